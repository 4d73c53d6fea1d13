"""What a softmax over a vocabulary knows of the columns seen so far, and what its gradient needs to know: the records
that the functions of logprobs.py and their Triton twins (kernels.py) both work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FLOOR = -1e4
"""Instead of anything lower where it meets its exp: that is 0 in every type, and the product would be NaN with -inf."""


@dataclass
class RunningSoftmax:
    """Statistics of N positions over the columns seen so far; each [N], in fp32, or in fp64 for fp64 logits."""

    maximum: Tensor  # largest z so far; the lowest finite number before any column
    sum_exp: Tensor  # sum of exp(z - maximum)
    sum_exp_z: Tensor  # sum of exp(z - maximum) (z - maximum)
    target: Tensor  # z of the target, or 0 where its column was not seen

    @classmethod
    def start(cls, like: Tensor, positions: int) -> RunningSoftmax:
        """Nothing seen yet of logits of the type and device of ``like``."""
        zeros = torch.zeros(3, positions, dtype=compute_dtype(like), device=like.device)
        # Not -inf: the difference of two of them is NaN.
        maximum = torch.full_like(zeros[0], torch.finfo(zeros.dtype).min)
        return cls(maximum, *zeros)

    def __getitem__(self, positions: slice) -> RunningSoftmax:
        """A view of some of the positions."""
        return RunningSoftmax(*(part[positions] for part in vars(self).values()))

    def rescale_(self, maximum: Tensor) -> None:
        """Makes ``maximum``, which is nowhere below the present one, the number that sums are relative to."""
        shift = (self.maximum - maximum).clamp_(min=FLOOR)
        scale = shift.exp()
        self.sum_exp_z.add_(self.sum_exp * shift).mul_(scale)
        self.sum_exp.mul_(scale)
        self.maximum.copy_(maximum)

    def reduce_(self, group: dist.ProcessGroup | None) -> None:
        """Makes statistics of each process's columns those of all columns."""
        if group is None or group.size() == 1:
            return
        maximum = self.maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        self.rescale_(maximum)
        sums = torch.stack([self.sum_exp, self.sum_exp_z, self.target])
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        self.sum_exp, self.sum_exp_z, self.target = sums

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """log p(target), the entropy, and log of the sum of exp(z), which the gradient needs."""
        log_sum = self.sum_exp.log()
        entropies = log_sum - self.sum_exp_z / self.sum_exp
        return self.target - self.maximum - log_sum, entropies, self.maximum + log_sum


@dataclass
class ResultGradients:
    """What the gradient of a block needs to know of the whole vocabulary and of the loss, each [N]."""

    log_sum_exp: Tensor
    entropy: Tensor
    of_log_prob: Tensor  # d loss / d log p(target)
    of_entropy: Tensor | None  # d loss / dH; None where the loss does not depend on the entropy

    @classmethod
    def of(
        cls, log_sum_exp: Tensor, entropies: Tensor, of_log_prob: Tensor | None, of_entropy: Tensor | None
    ) -> ResultGradients:
        """Gradients that autograd passes, of any shape, perhaps expanded, None where nothing depends on a result."""
        flat = [None if grad is None else grad.reshape(-1).contiguous() for grad in (of_log_prob, of_entropy)]
        return cls(log_sum_exp, entropies, torch.zeros_like(log_sum_exp) if flat[0] is None else flat[0], flat[1])

    def __getitem__(self, positions: slice) -> ResultGradients:
        return ResultGradients(*(None if part is None else part[positions] for part in vars(self).values()))


def compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
