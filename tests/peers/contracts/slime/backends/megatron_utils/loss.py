"""A plain policy gradient in slime's conventions, on one process without context parallelism."""

import torch


def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
                              **_):  # fmt: skip
    rows = logits.squeeze(0).log_softmax(-1).split(total_lengths)
    log_probs = [
        row[total - length - 1 : total - 1].gather(-1, tokens[total - length :, None]).squeeze(-1)
        for row, tokens, total, length in zip(rows, unconcat_tokens, total_lengths, response_lengths, strict=True)
    ]
    return torch.empty(0), {"log_probs": log_probs, "entropy": [torch.zeros_like(x) for x in log_probs]}


def get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, sample_denoms=None,
                           calculate_per_token_loss=False):  # fmt: skip
    def sum_of_sample_mean(values):
        sums = [(x * mask).sum() for x, mask in zip(values.split(response_lengths), loss_masks, strict=True)]
        if calculate_per_token_loss:
            return sum(sums)
        return sum(x / count.clamp(min=1) for x, count in zip(sums, sample_denoms, strict=True))

    return sum_of_sample_mean


def vanilla_tis_function(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    weights = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * weights.clamp(args.tis_clip_low, args.tis_clip), loss_masks, {}


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, computed = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lengths)
    old = torch.cat(batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"])
    pg_loss = -torch.cat(batch["advantages"]) * (torch.cat(computed["log_probs"]) - old).exp()
    if args.use_tis or args.get_mismatch_metrics:
        pg_loss, _, _ = vanilla_tis_function(args, pg_loss=pg_loss, train_log_probs=batch["log_probs"],
                                             rollout_log_probs=batch["rollout_log_probs"],
                                             loss_masks=batch["loss_masks"])  # fmt: skip
    loss = sum_of_sample_mean(pg_loss)
    return loss, {"loss": loss.detach()}
