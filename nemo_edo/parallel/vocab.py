"""Log-probabilities and entropies from logits whose vocabulary is split over processes, without gathering it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs_and_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and the entropy of p = softmax(logits / temperature), in nats, exact over the whole vocabulary.

    logits_shard: [..., V / tp], this process's columns, whose first has the global id ``vocab_start``. Every process
        of ``group`` holds as many, for the same positions; group None: the vocabulary is not split.
    targets: [...] int64 global ids, the same on every process. Each needs to be a real id, at padding too.
    vocab_size: columns with global ids from here on pad the embedding and have probability 0; None: there are none.
    with_entropy: False leaves the entropy out (None in its place).

    Returns [...] tensors, the same on every process, in fp32 (fp64 for fp64 logits), differentiable with respect to
    the logits. As with Megatron's own vocabulary-parallel losses, each process computes the whole loss from them,
    and its gradient reaches its own columns without communication.
    Raises ValueError for shapes that do not fit, a temperature not above 0, and targets outside the vocabulary.
    """
    if targets.shape != logits_shard.shape[:-1]:
        raise ValueError(f"targets have shape {tuple(targets.shape)}, logits_shard {tuple(logits_shard.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    if vocab_size is None:
        vocab_size = logits_shard.shape[-1] * (1 if group is None else group.size())
    if ((targets < 0) | (targets >= vocab_size)).any():
        raise ValueError(f"targets must lie in [0, {vocab_size}), found {targets.min()} to {targets.max()}")
    return _LogProbsAndEntropy.apply(logits_shard, targets, vocab_start, group, temperature, vocab_size, with_entropy)


class _LogProbsAndEntropy(torch.autograd.Function):
    """With z = logits / temperature - max and s = sum of exp(z): log p = z - log s, H = log s - sum of p z.

    d log p(target) / dz = onehot(target) - p          dH / dz = -p (log p + H)
    """

    @staticmethod
    def forward(ctx, logits, targets, vocab_start, group, temperature, vocab_size, with_entropy):
        # One copy of the logits, changed in place from here on: with large vocabularies it is what fills the memory.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        columns = z.shape[-1]
        z[..., min(max(vocab_size - vocab_start, 0), columns) :] = -torch.inf
        z -= _all_reduce(z.amax(dim=-1), dist.ReduceOp.MAX, group).unsqueeze(-1)

        local_targets = targets - vocab_start
        here = (local_targets >= 0) & (local_targets < columns)
        local_targets = local_targets.clamp(0, columns - 1).unsqueeze(-1)
        target_z = torch.where(here, z.gather(-1, local_targets).squeeze(-1), 0.0)

        z.clamp_(min=torch.finfo(z.dtype).min)  # finite, so that p * z is 0 where p is 0
        exp_z = z.exp()
        sums = [exp_z.sum(dim=-1), target_z]
        if with_entropy:
            sums.append(exp_z.mul_(z).sum(dim=-1))
        sum_exp, target_z, *sum_exp_z = _all_reduce(torch.stack(sums), dist.ReduceOp.SUM, group)
        log_sum = sum_exp.log()
        entropies = log_sum - sum_exp_z[0] / sum_exp if with_entropy else None

        log_p = z.sub_(log_sum.unsqueeze(-1))
        ctx.save_for_backward(log_p, entropies, local_targets, here)
        ctx.temperature, ctx.logits_dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return target_z - log_sum, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        log_p, entropies, local_targets, here = ctx.saved_tensors
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if grad_logprobs is not None:
            grad = p * -grad_logprobs.unsqueeze(-1)
            onehot = torch.where(here, grad_logprobs, 0.0).unsqueeze(-1)
            grad.scatter_add_(-1, local_targets, onehot)
        if grad_entropies is not None:  # p first: it is 0 where log p is the lowest number
            grad -= p * (log_p + entropies.unsqueeze(-1)) * grad_entropies.unsqueeze(-1)
        return (grad / ctx.temperature).to(ctx.logits_dtype), None, None, None, None, None, None


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor
