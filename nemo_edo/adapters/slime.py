"""ED-GRPO as a custom loss of slime: ``--loss-type custom_loss --custom-loss-function-path`` this function.

slime's own policy loss plus coefficient * E_old[log pi_theta - log pi_old], reduced by the function that slime gives to
each loss. The settings come from the YAML file of ``--custom-config-path``.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from slime.backends.megatron_utils import loss as slime_loss
from slime.utils.misc import load_function
from torch import Tensor

from nemo_edo.adapters.exploration_settings import ExplorationSettings, refuse_near_misses, warn_of_untested


def ed_grpo_loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's policy loss with the term; with a coefficient of 0, that loss to the last bit.

    args.exploration_coefficient and args.log_ratio_floor: ``ExplorationSettings``; the second may be absent. Tokens
    have the weights of slime's importance correction (``--use-tis``) and are rejected as it rejects them. Metrics:
    slime's, ``exploration`` (in nats, floored, without the coefficient) and ``floor_share``, reduced like all of
    slime's.
    Raises ValueError for a schedule with one optimizer step for each rollout.
    """
    warn_of_untested("slime")
    if not hasattr(args, "exploration_coefficient"):
        raise ValueError("exploration_coefficient is missing: set it in the YAML file of --custom-config-path")
    refuse_near_misses(frozenset(vars(args)), "")
    exploration = ExplorationSettings(args.exploration_coefficient, getattr(args, "log_ratio_floor", None))
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    exploration.require_several_steps(
        samples / args.global_batch_size,
        f"Set --num-steps-per-rollout to 2 or more, or --global-batch-size (now {args.global_batch_size}) below "
        f"--rollout-batch-size x --n-samples-per-prompt (now {samples})",
    )
    # The log-probabilities are those that slime's policy loss computes, so that nobody goes over the vocabulary twice.
    compute, seen = slime_loss.get_log_probs_and_entropy, []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        returned = compute(*args, **kwargs)
        seen.append(returned[1]["log_probs"])
        return returned

    slime_loss.get_log_probs_and_entropy = remembered
    try:
        loss, metrics = slime_loss.policy_loss_function(args, batch, logits, sum_of_sample_mean)
    finally:
        slime_loss.get_log_probs_and_entropy = compute
    [log_probs] = seen
    old_log_probs = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    old_log_probs = old_log_probs or [x.detach() for x in log_probs]
    # The mask is in ``sum_of_sample_mean``, which knows this rank's part of each sequence.
    row, old_row = (torch.cat(list(x))[None] for x in (log_probs, old_log_probs))
    everything = torch.ones_like(row)
    values = exploration.term(row, old_row, everything)[0][0]
    floor = exploration.log_ratio_floor
    below = torch.zeros_like(values) if floor is None else (row - old_row < floor)[0].to(values.dtype)
    metrics |= {"exploration": sum_of_sample_mean(values.detach()), "floor_share": sum_of_sample_mean(below)}
    if exploration.coefficient == 0:
        return loss, metrics
    if args.use_tis or args.get_mismatch_metrics:  # slime's correction for the sampler's mismatch, as slime asks
        path = args.custom_tis_function_path
        correct = slime_loss.vanilla_tis_function if path is None else load_function(path)
        lengths = {name: batch[name] for name in ("total_lengths", "response_lengths")}
        values, masks, _ = correct(
            args=args,
            pg_loss=values,
            train_log_probs=batch.get("log_probs") or [x.detach() for x in log_probs],
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
            **lengths,
        )
        sum_of_sample_mean = slime_loss.get_sum_of_sample_mean(
            *lengths.values(), masks, batch["rollout_mask_sums"], args.calculate_per_token_loss
        )
    return loss + exploration.coefficient * sum_of_sample_mean(values), metrics
