"""Losses that train a reward model: pairs (Bradley-Terry) and one positive among sampled negatives (ranking NCE).

Dimensions: P pairs, Q questions, K negatives of a question.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_edo.losses.term import LossTerm, require_finite


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | float | None = None,
    mask: Tensor | None = None,
) -> LossTerm:
    """-log sigmoid(r_w - r_l - margin), in nats, summed over pairs; count = pairs.

    The likelihood of the preferences under Bradley and Terry (1952), as in Ouyang et al. (2022, eq. 1); the margin,
    larger for clearer preferences, is Llama 2's (Touvron et al. 2023, eq. 2).

    chosen_scores, rejected_scores: [P] rewards r_w and r_l; the gradient flows through both.
    margin: [P], or one number for all pairs; a constant. None: 0.
    mask: [P], 1 where a pair counts; None: all count. A pair with mask 0 contributes nothing, whatever it holds.
    Raises ValueError for shapes other than [P] and, where a pair counts, for NaN or infinity.
    """
    if not isinstance(margin, Tensor):
        margin = torch.full_like(chosen_scores, margin or 0.0, dtype=torch.result_type(chosen_scores, 0.0))
    valid_P, (chosen_P, rejected_P, margin_P) = rows_without_padding(
        mask, chosen_scores=chosen_scores, rejected_scores=rejected_scores, margin=margin.detach()
    )
    return sum_over_rows(-F.logsigmoid(chosen_P - rejected_P - margin_P), valid_P)


def ranking_nce_loss(
    positive_scores: Tensor,
    negative_scores: Tensor,
    *,
    l2: float = 0.0,
    negative_mask: Tensor | None = None,
    weighting: str = "softmax",
) -> LossTerm:
    """One positive against K sampled negatives, in nats, summed over questions; count = questions with a negative.

    ===========  ===========================================  ==========================================
    weighting    loss of a question                           gradient
    ===========  ===========================================  ==========================================
    "softmax"    -r_+ + log(exp(r_+) + sum_k exp(r_k))        p_+ - 1 on r_+, and p_k on r_k
    "uniform"    -r_+ + mean_k r_k                            -1 on r_+, and 1/K on each r_k
    ===========  ===========================================  ==========================================

    with p the softmax over the K + 1 scores; both add l2 * (r_+^2 + mean_k r_k^2).

    "softmax" is the ranking loss of Ma and Collins (2018), which the paper's SearchLLM takes from BBox-Adapter (Sun
    et al. 2024): 0 for a perfect ranking, log(K + 1) for equal scores, and with K = 1 the Bradley-Terry loss.
    "uniform" is what BBox-Adapter's published code computes: its gradient does not look at the scores, and without l2
    it is unbounded below. Equal scores give 0.

    positive_scores: [Q] rewards r_+. negative_scores: [Q, K] rewards r_k. The gradient flows through both.
    l2: weight, at least 0, of the penalty on the size of the rewards.
    negative_mask: [Q, K], 1 where a negative counts (questions may have fewer than K); None: all count. Means over k
        are over those. A question without any negative ranks nothing: it contributes nothing, the penalty included,
        and is not counted, whatever it holds.
    Raises ValueError for other shapes, NaN or infinity at a score that counts, a negative or infinite l2, and an
    unknown weighting.
    """
    if weighting not in ("softmax", "uniform"):
        raise ValueError(f"weighting is {weighting!r}, expected softmax or uniform")
    check_coefficient("l2", l2)
    if negative_scores.ndim != 2 or positive_scores.shape != negative_scores.shape[:1]:
        raise ValueError(
            f"positive_scores has shape {tuple(positive_scores.shape)} and negative_scores "
            f"{tuple(negative_scores.shape)}, expected [Q] and [Q, K]"
        )
    valid_QK = valid_entries("negative_mask", negative_mask, negative_scores)
    negatives_QK = torch.where(valid_QK, negative_scores, 0.0)
    require_finite("negative_scores", negatives_QK)
    valid_Q, (positives_Q,) = rows_without_padding(valid_QK.any(dim=1), positive_scores=positive_scores)
    count_Q = valid_QK.sum(dim=1).clamp(min=1)  # a question without negatives: 0 / 1

    if weighting == "softmax":
        # -log p_+ as -log sigmoid(r_+ - log sum_k exp(r_k)): no overflow, and exact where p_+ is all but 1.
        absent_QK = ~valid_QK & valid_Q[:, None]  # logsumexp of -inf alone has a NaN gradient, even where it is unused
        losses_Q = -F.logsigmoid(positives_Q - negatives_QK.masked_fill(absent_QK, -torch.inf).logsumexp(dim=1))
    else:
        losses_Q = negatives_QK.sum(dim=1) / count_Q - positives_Q
    if l2 > 0:
        losses_Q = losses_Q + l2 * (positives_Q.square() + negatives_QK.square().sum(dim=1) / count_Q)
    return sum_over_rows(losses_Q, valid_Q)


def rows_without_padding(
    mask: Tensor | None, *, mask_name: str = "mask", **rows: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Which rows count (bool), and the named one-dimensional tensors, in order, with exact zeros in the other rows.

    ``without_padding`` for one value a pair, sequence or question. mask: 1 where a row counts; None: all count.
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


def sum_over_rows(values: Tensor, valid: Tensor) -> LossTerm:
    """The values of the rows that count, added up; count = those rows."""
    return LossTerm(torch.where(valid, values, 0.0).sum(), valid.sum())


def check_coefficient(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0")
