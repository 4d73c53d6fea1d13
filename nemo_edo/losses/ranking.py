"""The loss that trains a reward model for search: one positive step against sampled negatives (ranking NCE).

Dimensions: Q questions, K negatives of a question.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_edo.losses.checks import check_coefficient, checked, require_finite
from nemo_edo.losses.term import LossTerm, read_rows, sum_over_rows, valid_entries


@checked
def ranking_nce_loss(
    positive_scores: Tensor,
    negative_scores: Tensor,
    *,
    l2: float = 0.0,
    negative_mask: Tensor | None = None,
    weighting: str = "softmax",
) -> LossTerm:
    """One positive against K sampled negatives, in nats, summed over questions; count = questions with a negative.

    | weighting | loss of a question                         | gradient                        |
    |-----------|--------------------------------------------|---------------------------------|
    | "softmax" | -r_+ + log(exp(r_+) + sum_k exp(r_k))      | p_+ - 1 on r_+, and p_k on r_k  |
    | "uniform" | -r_+ + mean_k r_k                          | -1 on r_+, and 1/K on each r_k  |

    with p the softmax over the K + 1 scores; both add l2 * (r_+^2 + mean_k r_k^2).

    "softmax" is the ranking loss of Ma and Collins (2018), which the paper's SearchLLM takes from BBox-Adapter (Sun
    et al. 2024): 0 for a perfect ranking, log(K + 1) for equal scores, and with K = 1 the Bradley-Terry loss.
    "uniform" is what BBox-Adapter's published code computes: its gradient does not look at the scores, and without l2
    it is unbounded below. Equal scores give 0.

    positive_scores: [Q] rewards r_+. negative_scores: [Q, K] rewards r_k. The gradient flows through both.
    l2: weight, at least 0, of the penalty on the size of the rewards.
    negative_mask: [Q, K], 1 where a negative counts (questions may have fewer than K); None: all count. Means over k
        are over those. A question without any negative ranks nothing: it contributes nothing, the penalty included,
        and is not counted, NaN included.
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
    valid_Q, (positives_Q,) = read_rows(valid_QK.any(dim=1), positive_scores=positive_scores)
    count_Q = valid_QK.sum(dim=1).clamp(min=1)  # a question without negatives: 0 / 1

    if weighting == "softmax":
        # -log p_+ as -log sigmoid(r_+ - log sum_k exp(r_k)): no overflow, and exact where p_+ is all but 1.
        losses_Q = -F.logsigmoid(positives_Q - negatives_QK.masked_fill(~valid_QK, -torch.inf).logsumexp(dim=1))
    else:
        losses_Q = negatives_QK.sum(dim=1) / count_Q - positives_Q
    if l2 > 0:
        losses_Q = losses_Q + l2 * (positives_Q.square() + negatives_QK.square().sum(dim=1) / count_Q)
    return sum_over_rows(losses_Q, valid_Q)
