"""The softmax over a vocabulary that is seen a block of columns at a time: what a block adds, and its gradient.

Both heads (vocab.py from logits, linear.py from hidden states) are loops around these functions. With z = logits /
temperature, p = softmax(z) over the whole vocabulary and H its entropy,

    d log p(target) / dz = onehot(target) - p          dH / dz = -p (log p + H)

Sums are online (Milakov and Gimelshein 2018): relative to the largest z so far, and rescaled when it grows. On GPUs
the two functions are Triton kernels (kernels.py), for the types that are trained in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FLOOR = -1e4
"""Instead of anything lower, infinity included, where it meets an exp of itself: that is 0 in every type, and so is
the product, which would be no number with -inf."""


@dataclass
class RunningSoftmax:
    """Of N positions, over the columns seen so far; each [N], in fp32, or in fp64 for fp64 logits."""

    maximum: Tensor
    """Of z; the lowest finite number before any column."""
    sum_exp: Tensor
    """Sum of exp(z - maximum)."""
    sum_exp_z: Tensor | None
    """Sum of exp(z - maximum) (z - maximum); None where no entropy is asked for."""
    target: Tensor
    """z of the target, or 0 where its column was not seen."""

    @classmethod
    def start(cls, like: Tensor, positions: int, with_entropy: bool) -> RunningSoftmax:
        """Nothing seen yet of logits of the type and device of ``like``."""
        zero = torch.zeros(positions, dtype=compute_dtype(like), device=like.device)
        # Not -inf: the difference of two of them is no number.
        maximum = torch.full_like(zero, torch.finfo(zero.dtype).min)
        return cls(maximum, zero, zero.clone() if with_entropy else None, zero.clone())

    def __getitem__(self, positions: slice) -> RunningSoftmax:
        """A view of some of the positions."""
        parts = (self.maximum, self.sum_exp, self.sum_exp_z, self.target)
        return RunningSoftmax(*(None if part is None else part[positions] for part in parts))

    def rescale_(self, maximum: Tensor) -> None:
        """Makes ``maximum``, which is nowhere below the present one, the number that sums are relative to."""
        shift = (self.maximum - maximum).clamp_(min=FLOOR)
        scale = shift.exp()
        if self.sum_exp_z is not None:
            self.sum_exp_z.add_(self.sum_exp * shift).mul_(scale)
        self.sum_exp.mul_(scale)
        self.maximum.copy_(maximum)

    def reduce_(self, group: dist.ProcessGroup | None) -> None:
        """From each process's columns to those of all."""
        if group is None:
            return
        maximum = self.maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        self.rescale_(maximum)
        names = [name for name in ("sum_exp", "sum_exp_z", "target") if getattr(self, name) is not None]
        sums = torch.stack([getattr(self, name) for name in names])
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        for name, total in zip(names, sums, strict=True):
            setattr(self, name, total)

    def results(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """log p(target), the entropy or None, and log of the sum of exp(z), which the gradient needs."""
        log_sum = self.sum_exp.log()
        entropies = None if self.sum_exp_z is None else log_sum - self.sum_exp_z / self.sum_exp
        return self.target - self.maximum - log_sum, entropies, self.maximum + log_sum


@dataclass
class ResultGradients:
    """What the gradient of a block needs to know of the whole vocabulary and of the loss, each [N]."""

    log_sum_exp: Tensor
    entropy: Tensor | None
    of_log_prob: Tensor
    """d loss / d log p(target)."""
    of_entropy: Tensor | None
    """d loss / dH; None where the loss does not depend on the entropy."""

    @classmethod
    def of(
        cls, log_sum_exp: Tensor, entropies: Tensor | None, of_log_prob: Tensor | None, of_entropy: Tensor | None
    ) -> ResultGradients:
        """From what autograd hands over: of any shape, perhaps expanded, None where nothing depends on a result."""
        flat = [None if grad is None else grad.reshape(-1).contiguous() for grad in (of_log_prob, of_entropy)]
        return cls(log_sum_exp, entropies, torch.zeros_like(log_sum_exp) if flat[0] is None else flat[0], flat[1])

    def __getitem__(self, positions: slice) -> ResultGradients:
        parts = (self.log_sum_exp, self.entropy, self.of_log_prob, self.of_entropy)
        return ResultGradients(*(None if part is None else part[positions] for part in parts))


def compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


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
    if softmax.sum_exp_z is None:
        softmax.sum_exp += z.exp_().sum(dim=1)
    else:
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
