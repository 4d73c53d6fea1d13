"""A loss as a sum and the count that it is divided by: how masked values become one, and the two plainest losses.

Dimensions: B sequences, T response tokens of a padded sequence; a row is one pair, sequence or question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

REDUCTIONS = ("seq-sum", "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
ROWS = ("non-empty", "all")
ON_EMPTY = ("error", "zero")


class NotFinite(ValueError):
    """NaN or infinity where a loss needs numbers: a fault of this batch's values, not of how the loss is called."""


@dataclass(frozen=True, eq=False)
class LossTerm:
    """A sum, and the count that the global sum is divided by once all micro-batches and ranks have been added."""

    sum: Tensor
    """Scalar, differentiable."""
    count: Tensor | float
    """Sequences, tokens or pairs: whatever the reduction's docstring says."""

    def mean(self) -> Tensor:
        """sum / count. No samples at all (0/0) give 0, with gradient zero."""
        count = torch.as_tensor(self.count, dtype=self.sum.dtype, device=self.sum.device)
        nothing = (count == 0) & (self.sum == 0)
        return self.sum / (count + nothing)

    def __add__(self, other: LossTerm) -> LossTerm:
        """The same quantity over both sets of samples: two micro-batches, or two ranks."""
        return LossTerm(self.sum + other.sum, self.count + other.count)

    def scaled(self, factor: float) -> LossTerm:
        return LossTerm(self.sum * factor, self.count)

    def plus(self, other: LossTerm, weight: float) -> LossTerm:
        """This loss plus ``weight`` times another one over the same samples. Raises ValueError if the counts differ."""
        if self.count != other.count:
            raise ValueError(
                f"plus() combines terms of the same samples, but the counts are {self.count} and {other.count}; "
                "use one reduction and one mask for both"
            )
        return LossTerm(self.sum + weight * other.sum, self.count)

    def detached(self) -> LossTerm:
        """The value without its graph, for metrics."""
        return LossTerm(self.sum.detach(), self.count)


# --- masks ---------------------------------------------------------------------------------------------------------


def valid_tokens(mask_BT: Tensor) -> Tensor:
    """[B, T] bool. Raises ValueError for a mask that is not two-dimensional or has values other than 0 and 1."""
    if mask_BT.ndim != 2:
        raise ValueError(f"mask has shape {tuple(mask_BT.shape)}, expected [B, T]")
    return valid_entries("mask", mask_BT, mask_BT)


def require_tokens(mask_BT: Tensor, on_empty: str = "error") -> None:
    """What the losses do first with a mask that has no 1.

    on_empty: "error", ValueError: in one process, a loss over no token at all is a mistake of its caller; "zero": the
    sum is 0 and has a gradient, of zeros. For trainers that form such micro-batches (all responses truncated and
    masked): an error on one rank would leave the others waiting.
    """
    if on_empty not in ON_EMPTY:
        raise ValueError(f"on_empty is {on_empty!r}, expected one of {', '.join(ON_EMPTY)}")
    if not valid_tokens(mask_BT).any() and on_empty == "error":
        raise ValueError(f"mask is empty: none of its {tuple(mask_BT.shape)} entries is 1, so no token counts")


def valid_entries(name: str, mask: Tensor | None, values: Tensor) -> Tensor:
    """The mask as bool; all true without one. Raises ValueError for another shape or values other than 0 and 1."""
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {tuple(values.shape)}")
    valid = mask != 0
    if not (mask == valid).all():
        raise ValueError(f"{name} has values other than 0 and 1")
    return valid


def without_padding(mask_BT: Tensor, **tensors_BT: Tensor) -> list[Tensor]:
    """The named [B, T] tensors, in order, with exact zeros where the mask is 0.

    ``torch.where`` comes before any arithmetic, so that whatever padding holds (NaN, infinity) reaches neither values
    nor gradients. Raises ValueError, naming the argument, for a tensor that differs from the mask in shape, or that is
    not finite where the mask is 1.
    """
    valid_BT = valid_tokens(mask_BT)
    clean = []
    for name, tensor_BT in tensors_BT.items():
        if tensor_BT.shape != mask_BT.shape:
            raise ValueError(f"{name} has shape {tuple(tensor_BT.shape)}, but mask has {tuple(mask_BT.shape)}")
        clean.append(torch.where(valid_BT, tensor_BT, 0.0))
        require_finite(name, clean[-1])
    return clean


def rows_without_padding(
    mask: Tensor | None, *, mask_name: str = "mask", **rows: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Which rows count (bool), and the named one-dimensional tensors, in order, with exact zeros in the other rows.

    ``without_padding`` for one value per row. mask: 1 where a row counts; None: all count.
    Raises ValueError, naming the argument, for a tensor of other dimensions, shapes that differ, a mask with values
    other than 0 and 1, and NaN or infinity in a row that counts.
    """
    first_name, first = next(iter(rows.items()))
    if first.ndim != 1:
        raise ValueError(f"{first_name} has shape {tuple(first.shape)}, expected one dimension: a value for each row")
    valid = valid_entries(mask_name, mask, first)
    clean = []
    for name, values in rows.items():
        if values.shape != first.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, but {first_name} has {tuple(first.shape)}")
        clean.append(torch.where(valid, values, 0.0))
        require_finite(name, clean[-1])
    return valid, clean


def per_token(values: Tensor, mask_BT: Tensor) -> Tensor:
    """A [B] tensor as [B, T], the same value at every token of its sequence; any other tensor as it is."""
    return values[:, None].expand(mask_BT.shape) if values.shape == mask_BT.shape[:1] else values


def require_finite(name: str, values: Tensor) -> None:
    """Raises NotFinite, with the name, if any value is NaN or infinite."""
    if not torch.isfinite(values).all():
        raise NotFinite(f"{name} has NaN or infinite values at positions that count (mask 1); all must be finite")


def check_coefficient(name: str, value: float) -> None:
    """Raises ValueError unless the number is finite and at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0")


# --- reductions ----------------------------------------------------------------------------------------------------


def reduction_count(mask_BT: Tensor, reduction: str, *, rows: str = "non-empty", on_empty: str = "error") -> Tensor:
    """What ``reduce_tokens`` divides by, from the mask alone: the trainer needs it before it has any values.

    mask_BT: [B, T]. The result is a scalar int64: valid tokens for "token-mean", otherwise sequences.
    rows: which sequences count: "non-empty", those with at least one valid token, or "all", those without one too
        (TRL). on_empty: see ``require_tokens``.
    Raises ValueError for an unknown reduction or an invalid mask.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    if rows not in ROWS:
        raise ValueError(f"rows is {rows!r}, expected one of {', '.join(ROWS)}")
    require_tokens(mask_BT, on_empty)
    valid_BT = valid_tokens(mask_BT)
    if reduction == "token-mean":
        return valid_BT.sum()
    return (valid_BT.any(dim=1) | (rows == "all")).sum()


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
    norm_length: the constant length, in tokens, of "seq-mean-token-sum-norm" (Dr.GRPO, Liu et al. 2025); the other
    reductions do not read it.
    rows: the sequences that the count includes (``reduction_count``). on_empty: see ``require_tokens``.
    Raises ValueError for shapes that differ, an empty mask, NaN or infinity at a valid token, an unknown reduction or
    a missing norm_length.
    """
    count = reduction_count(mask_BT, reduction, rows=rows, on_empty=on_empty)
    (values_BT,) = without_padding(mask_BT, values_BT=values_BT)
    sums_B = values_BT.sum(dim=1)
    if reduction == "seq-mean-token-mean":
        lengths_B = valid_tokens(mask_BT).sum(dim=1)
        sums_B = sums_B / lengths_B.clamp(min=1)  # an empty sequence: 0 / 1
    elif reduction == "seq-mean-token-sum-norm":
        if norm_length is None or norm_length <= 0:
            raise ValueError(f"norm_length is {norm_length}, expected a number above 0 with {reduction!r}")
        sums_B = sums_B / norm_length
    return LossTerm(sums_B.sum(), count)


def token_mean(values_BT: Tensor, mask_BT: Tensor) -> LossTerm:
    """A metric: the mean over valid tokens, without gradient; sum and count 0 for an empty mask."""
    return reduce_tokens(values_BT.detach(), mask_BT, "token-mean", on_empty="zero")


def sum_over_rows(values: Tensor, valid: Tensor) -> LossTerm:
    """The values of the rows that count, added up; count = those rows."""
    return LossTerm(torch.where(valid, values, 0.0).sum(), valid.sum())


# --- the two plainest losses ---------------------------------------------------------------------------------------


def sft_loss(logprobs_BT: Tensor, mask_BT: Tensor, *, on_empty: str = "error") -> LossTerm:
    """Negative log-likelihood in nats, summed over tokens with mask 1; count = such tokens.

    logprobs_BT: [B, T] natural log-probabilities of the tokens; mask_BT: [B, T].
    Raises ValueError for shapes that differ and for NaN or infinity at a valid token.
    """
    (logprobs_BT,) = without_padding(mask_BT, logprobs_BT=logprobs_BT)
    return reduce_tokens(-logprobs_BT, mask_BT, "token-mean", on_empty=on_empty)


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

    entropies_BT: exact entropies in nats of pi_theta(. | x, y_<t) at the sampled positions.
    Sum, count, the other arguments and errors are those of ``reduce_tokens``.
    """
    (entropies_BT,) = without_padding(mask_BT, entropies_BT=entropies_BT)
    return reduce_tokens(-entropies_BT, mask_BT, reduction, norm_length, rows=rows, on_empty=on_empty)
