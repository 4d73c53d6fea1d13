"""The softmax over a vocabulary that is seen a block of columns at a time: what a block adds, and its gradient.

Both heads of logprobs.py are loops around these functions. With z = logits /
temperature, p = softmax(z) over the whole vocabulary and H its entropy,

    d log p(target) / dz = onehot(target) - p          dH / dz = -p (log p + H)

Sums are online (Milakov and Gimelshein 2018): relative to the largest z so far, and rescaled when it grows. On GPUs
the two functions are Triton kernels (kernels.py), for the types that are trained in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_edo.parallel.softmax_state import FLOOR, ResultGradients, RunningSoftmax, compute_dtype


def add_columns(
    softmax: RunningSoftmax, logits: Tensor, targets: Tensor, temperature: float, *, overwrite: bool = False
) -> None:
    """Adds a block of columns. logits: [N, C]. targets: [N], of which 0 to C - 1 are columns of this block.

    overwrite: the logits are needed no more, and their memory may be used.
    """
    if _has_kernels(logits):
        from nemo_edo.parallel import kernels

        kernels.add_columns(softmax, logits, targets, temperature)
        return
    z = logits.to(compute_dtype(logits), copy=not overwrite)
    if temperature != 1:
        z.div_(temperature)
    here, column = _locate(targets, z.shape[1])
    softmax.target.copy_(torch.where(here, z.gather(1, column).squeeze(1), softmax.target))
    softmax.rescale_(torch.maximum(softmax.maximum, z.amax(dim=1)))
    z.sub_(softmax.maximum.unsqueeze(1))
    z.clamp_(min=FLOOR)
    exp_z = z.exp()
    softmax.sum_exp += exp_z.sum(dim=1)
    softmax.sum_exp_z += exp_z.mul_(z).sum(dim=1)


def write_gradient(out: Tensor, logits: Tensor, targets: Tensor, temperature: float, results: ResultGradients) -> None:
    """Writes the logits' gradient into ``out`` [N, C], which may be the logits themselves.

    logits, targets: as in ``add_columns``.
    """
    if _has_kernels(logits):
        from nemo_edo.parallel import kernels

        kernels.write_gradient(out, logits, targets, temperature, results)
        return
    z = out if out.dtype == compute_dtype(logits) else torch.empty_like(out, dtype=compute_dtype(logits))
    z.copy_(logits)
    if temperature != 1:
        z.div_(temperature)
    z.sub_(results.log_sum_exp.unsqueeze(1))
    if results.of_entropy is None:
        z.exp_().mul_(-results.of_log_prob.unsqueeze(1))
    else:
        p = z.clamp_(min=FLOOR).exp()
        constant = torch.addcmul(results.of_log_prob, results.of_entropy, results.entropy)
        z.mul_(results.of_entropy.unsqueeze(1)).add_(constant.unsqueeze(1)).mul_(p).neg_()
    here, column = _locate(targets, z.shape[1])
    z.scatter_add_(1, column, torch.where(here, results.of_log_prob, 0.0).unsqueeze(1))
    if temperature != 1:
        z.div_(temperature)
    if z is not out:
        out.copy_(z)


def _locate(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a target is one of the columns [N], and which [N, 1] (any, where it is none)."""
    return (targets >= 0) & (targets < columns), targets.clamp(0, columns - 1).unsqueeze(1)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
