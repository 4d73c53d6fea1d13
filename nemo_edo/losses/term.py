"""A loss as a sum and the count that it is divided by: which tokens count, how their values become a sum, and the two
plainest losses.

Dimensions: B sequences, T response tokens of a padded sequence; a row is one pair, sequence or question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_edo.config.losses import KL_ESTIMATORS
from nemo_edo.losses.checks import checked, require_finite, require_logprobs, require_values

REDUCTIONS = ("seq-sum", "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
ROWS = ("non-empty", "all")
ON_EMPTY = ("error", "zero")


@dataclass(frozen=True, eq=False)
class LossTerm:
    """A sum, and the count that the global sum is divided by once all micro-batches and ranks have been added."""

    sum: Tensor
    """Scalar, differentiable."""
    count: Tensor | float
    """Sequences, tokens or pairs: whatever the reduction's docstring says."""

    def mean(self) -> Tensor:
        """sum / count. No samples at all (0/0) give 0, with gradient zero."""
        # A 16-bit number could not hold the count.
        exact = torch.promote_types(self.sum.dtype, torch.float32)
        count = torch.as_tensor(self.count, dtype=exact, device=self.sum.device)
        nothing = (count == 0) & (self.sum == 0)
        return (self.sum.to(exact) / (count + nothing)).to(self.sum.dtype)

    def __add__(self, other: LossTerm) -> LossTerm:
        """The same quantity over both sets of samples: two micro-batches, or two ranks."""
        return LossTerm(self.sum + other.sum, self.count + other.count)

    def scaled(self, factor: float) -> LossTerm:
        return LossTerm(self.sum * factor, self.count)

    def plus(self, other: LossTerm, weight: float) -> LossTerm:
        """This loss plus ``weight`` times another one over the same samples. Raises ValueError if the counts differ."""
        if self.count is not other.count:
            require_values(
                self.count == other.count,
                lambda: ValueError(
                    f"plus() combines terms of the same samples, but the counts are {self.count} and {other.count}; "
                    "use one reduction and one mask for both"
                ),
            )
        return LossTerm(self.sum + weight * other.sum, self.count)

    def detached(self) -> LossTerm:
        """The value without its graph, for metrics."""
        return LossTerm(self.sum.detach(), self.count)


# --- what counts ---------------------------------------------------------------------------------------------------


def valid_entries(name: str, mask: Tensor | None, values: Tensor) -> Tensor:
    """The mask as bool; all true without one. Raises ValueError for another shape or values other than 0 and 1."""
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {tuple(values.shape)}")
    valid = mask != 0
    require_values(mask == valid, lambda: ValueError(f"{name} has values other than 0 and 1"))
    return valid


def read_tokens(
    mask_BT: Tensor, on_empty: str = "error", *, mask_name: str = "mask", **tensors_BT: Tensor | None
) -> tuple[Tensor, list[Any]]:
    """Which tokens count, [B, T] bool, and the named [B, T] tensors, in order, with exact zeros at all other tokens.

    Every public function of token values begins with it, and what it calls relies on its result. None stays None.
    ``torch.where`` comes before any arithmetic, so that whatever padding holds (NaN, infinity) reaches neither values
    nor gradients.
    on_empty: a mask without a 1 is an "error", ValueError: in one process, a loss over no token is a mistake of its
        caller; or "zero": sums are 0 and have a gradient, of zeros. For trainers that form such micro-batches (all
        responses truncated and masked): an error on one rank would leave the others waiting.
    Raises ValueError for a mask that is not two-dimensional or has values other than 0 and 1, and, naming the argument,
    for a tensor that differs from it in shape, or that is not finite where the mask is 1, or log-probabilities above 0.
    """
    if on_empty not in ON_EMPTY:
        raise ValueError(f"on_empty is {on_empty!r}, expected one of {', '.join(ON_EMPTY)}")
    if mask_BT.ndim != 2:
        raise ValueError(f"{mask_name} has shape {tuple(mask_BT.shape)}, expected [B, T]")
    valid_BT = valid_entries(mask_name, mask_BT, mask_BT)
    if on_empty == "error":
        message = f"{mask_name} is empty: none of its {tuple(mask_BT.shape)} entries is 1, so no token counts"
        require_values(valid_BT.any(), lambda: ValueError(message))
    zero = torch.zeros((), device=valid_BT.device)  # once: torch.where would fill another one for each number 0.0
    clean = [x if x is None else _clean(name, x, valid_BT, zero, mask_name) for name, x in tensors_BT.items()]
    for name, x in zip(tensors_BT, clean, strict=True):
        if x is not None and "logprobs" in name:
            require_logprobs(name, x)
    return valid_BT, clean


def read_rows(mask: Tensor | None, *, mask_name: str = "mask", **rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``read_tokens`` for one value per row: which rows count (mask None: all), and the named tensors."""
    first_name, first = next(iter(rows.items()))
    if first.ndim != 1:
        raise ValueError(f"{first_name} has shape {tuple(first.shape)}, expected one dimension: a value for each row")
    valid = valid_entries(mask_name, mask, first)
    zero = torch.zeros((), device=valid.device)
    return valid, [_clean(name, values, valid, zero, first_name) for name, values in rows.items()]


def _clean(name: str, values: Tensor, valid: Tensor, zero: Tensor, other: str) -> Tensor:
    if values.shape != valid.shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, but {other} has {tuple(valid.shape)}")
    clean = torch.where(valid, values, zero)
    require_finite(name, clean)
    return clean


def per_token(values: Tensor, mask_BT: Tensor) -> Tensor:
    """A [B] tensor as [B, T], the same value at every token of its sequence; any other tensor as it is."""
    return values[:, None].expand(mask_BT.shape) if values.shape == mask_BT.shape[:1] else values


# --- reductions ----------------------------------------------------------------------------------------------------


class Reduction:
    """How values of the tokens that count become a sum and a count (``reduce_tokens``): the same for all terms of a
    loss, whose counts are therefore one."""

    def __init__(
        self, valid_BT: Tensor, reduction: str, norm_length: float | None = None, rows: str = "non-empty"
    ) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
        if rows not in ROWS:
            raise ValueError(f"rows is {rows!r}, expected one of {', '.join(ROWS)}")
        by_constant = reduction == "seq-mean-token-sum-norm"
        if by_constant and (norm_length is None or isinstance(norm_length, bool) or not 0 < norm_length < math.inf):
            raise ValueError(f"norm_length is {norm_length}, expected a number above 0 with {reduction!r}")
        self.valid_BT = valid_BT
        self.divisor: Tensor | float | None = norm_length if by_constant else None
        if reduction == "token-mean":
            self.count = valid_BT.sum()
        else:
            lengths_B = valid_BT.sum(dim=1)
            self.count = (lengths_B > (0 if rows == "non-empty" else -1)).sum()
            if reduction == "seq-mean-token-mean":
                self.divisor = lengths_B.clamp(min=1)  # an empty sequence: 0 / 1

    def __call__(self, values_BT: Tensor) -> LossTerm:
        [term] = self.each([values_BT])
        return term

    def each(self, values: Sequence[Tensor]) -> list[LossTerm]:
        """The terms of several [B, T] tensors of one type, which are reduced together; they are finite at padding."""
        stacked = values[0][None] if len(values) == 1 else torch.stack(list(values))
        dtype = stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype()
        valid = stacked * self.valid_BT  # torch.where would make a zero first, and again for the gradient
        if self.divisor is None:
            sums = valid.sum(dim=(1, 2), dtype=dtype)
        else:
            sums = (valid.sum(dim=2, dtype=dtype) / self.divisor).sum(dim=1)
        return [LossTerm(total, self.count) for total in sums.unbind()]


@checked
def reduction_count(mask_BT: Tensor, reduction: str, *, rows: str = "non-empty", on_empty: str = "error") -> Tensor:
    """What ``reduce_tokens`` divides by, from the mask alone: the trainer needs it before it has any values. A scalar
    int64: valid tokens for "token-mean", otherwise sequences."""
    valid_BT, _ = read_tokens(mask_BT, on_empty)
    return Reduction(valid_BT, reduction, 1.0, rows).count


@checked
def reduce_tokens(
    values_BT: Tensor,
    mask_BT: Tensor,
    reduction: str,
    norm_length: float | None = None,
    *,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> LossTerm:
    """Adds up token values where the mask is 1; a sequence without such a token adds nothing to the sum.

    | reduction                   | sum                                               | count     |
    |-----------------------------|---------------------------------------------------|-----------|
    | "seq-sum"                   | over sequences of the sum over tokens             | sequences |
    | "seq-mean-token-mean"       | over sequences of the mean over their tokens      | sequences |
    | "token-mean"                | over all tokens                                   | tokens    |
    | "seq-mean-token-sum-norm"   | over all tokens, divided by ``norm_length``       | sequences |

    values_BT, mask_BT: [B, T]; the mask is 1 where a token counts.
    norm_length: the constant length, in tokens, of "seq-mean-token-sum-norm" (Dr.GRPO, Liu et al. 2025).
    rows: which sequences count: "non-empty", those with at least one valid token, or "all", those without one too
    (TRL).
    on_empty: see ``read_tokens``.
    Raises ValueError as ``read_tokens`` does, and for an unknown reduction or a missing norm_length.
    """
    valid_BT, (values_BT,) = read_tokens(mask_BT, on_empty, values_BT=values_BT)
    return Reduction(valid_BT, reduction, norm_length, rows)(values_BT)


def token_mean(values_BT: Tensor, valid_BT: Tensor) -> LossTerm:
    """A metric: the mean over valid tokens, without gradient; sum and count 0 for an empty mask."""
    return Reduction(valid_BT, "token-mean")(values_BT.detach())


def token_means(metrics: Mapping[str, Tensor], valid_BT: Tensor) -> dict[str, LossTerm]:
    """``token_mean`` of each, with a few kernels for all of them."""
    reduction = Reduction(valid_BT, "token-mean")
    means: dict[str, LossTerm] = {}
    for dtype in dict.fromkeys(values.dtype for values in metrics.values()):
        names = [name for name, values in metrics.items() if values.dtype == dtype]
        means |= dict(zip(names, reduction.each([metrics[name].detach() for name in names]), strict=True))
    return {name: means[name] for name in metrics}


def sum_over_rows(values: Tensor, valid: Tensor) -> LossTerm:
    """The values of the rows that count, added up; count = those rows."""
    return LossTerm(torch.where(valid, values, 0.0).sum(), valid.sum())


# --- the two plainest losses, and the KL -----------------------------------------------------------------------------


@checked
def sft_loss(logprobs_BT: Tensor, mask_BT: Tensor, *, on_empty: str = "error") -> LossTerm:
    """Negative log-likelihood in nats (logprobs_BT: [B, T]), summed over tokens with mask 1; count = such tokens."""
    valid_BT, (logprobs_BT,) = read_tokens(mask_BT, on_empty, logprobs_BT=logprobs_BT)
    return Reduction(valid_BT, "token-mean")(-logprobs_BT)


@checked
def entropy_bonus(
    entropies_BT: Tensor,
    mask_BT: Tensor,
    *,
    reduction: str,
    norm_length: float | None = None,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> LossTerm:
    """The **negative** entropy: multiplied by a positive coefficient and added to a minimised loss, it raises entropy.
    entropies_BT: exact entropies in nats of pi_theta(. | x, y_<t) at the sampled positions. All else as
    ``reduce_tokens``."""
    valid_BT, (entropies_BT,) = read_tokens(mask_BT, on_empty, entropies_BT=entropies_BT)
    return Reduction(valid_BT, reduction, norm_length, rows)(-entropies_BT)


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(pi_theta || pi_ref) at each token, in nats, not reduced (Schulman 2020; for their gradients, Tang
    and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL").

    With d = log pi_theta - log pi_ref on a token sampled from pi_theta:

    - "k1" = d: unbiased. Its gradient is zero in expectation: minimising it alone descends no KL.
    - "k2" = d^2 / 2: biased. Its gradient descends the reverse KL(pi_theta || pi_ref).
    - "k3" = exp(-d) - 1 + d: unbiased, never negative. Its gradient descends the forward KL(pi_ref || pi_theta).
    - "k1+" and "k3+": the value of k1 or k3, unbiased, with the gradient of k2, which descends the reverse KL(pi_theta
      || pi_ref) (straight-through; the names are verl's).

    Those gradients are in expectation over tokens from pi_theta, taken through the value and not through sampling.
    logprobs: natural log-probabilities under pi_theta, of any shape. ref_logprobs: under pi_ref, a constant.
    Raises ValueError for shapes that differ or an unknown estimator. The caller, who knows the padding, refuses values
    that are not finite: k3 overflows where pi_theta is far below pi_ref.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"ref_logprobs has shape {tuple(ref_logprobs.shape)}, but logprobs {tuple(logprobs.shape)}")
    d = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d  # exp(-d) - 1 would cancel to noise, and below zero, for small d
    if estimator in ("k1+", "k3+"):
        value = kl_per_token(logprobs, ref_logprobs, estimator.removesuffix("+")).detach()
        k2 = kl_per_token(logprobs, ref_logprobs, "k2")
        return value + (k2 - k2.detach())  # the bracket is exactly 0: the value stays k1's or k3's to the last bit
    raise ValueError(f"estimator is {estimator!r}, expected one of {', '.join(KL_ESTIMATORS)}")
