"""Best-of-N: the candidate with the highest reward-model score (Stiennon et al. 2020; Cobbe et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

STEP_AGGREGATIONS = ("last", "min", "product", "mean")

Candidate = TypeVar("Candidate")


def best_of_n(
    candidates: Sequence[Candidate],
    scores: Sequence[float | Sequence[float]],
    *,
    aggregation: str | None = None,
) -> Candidate:
    """argmax over the N candidates of their score, the first among equals; the only one where N = 1.

    Only the order of the scores matters: a strictly increasing transform keeps the choice. To add up the scores of
    candidates with the same answer instead (weighted best-of-N), see ``weighted_vote``.

    scores: a number for each candidate; or, with ``aggregation``, the scores of each candidate's steps, made one
    number by ``aggregate_steps`` ("last" is the paper's).
    Raises ValueError for no candidates, not exactly one score for each, and, with the index, for a score that is not a
    finite number or that ``aggregate_steps`` refuses.
    """
    if len(candidates) == 0:
        raise ValueError("candidates is empty, expected at least one")
    if len(scores) != len(candidates):
        raise ValueError(f"{len(scores)} scores for {len(candidates)} candidates, expected one for each")
    totals = []
    for index, score in enumerate(scores):
        if (np.ndim(score) == 0) != (aggregation is None):
            expected = "a number, or an aggregation of step scores" if aggregation is None else "its steps' scores"
            raise ValueError(f"scores[{index}] is {score!r}, expected {expected}")
        try:  # a number is the score of an only step
            totals.append(aggregate_steps(np.atleast_1d(score).tolist(), aggregation or "last"))
        except ValueError as error:
            raise ValueError(f"scores[{index}]: {error}") from error
    return candidates[max(range(len(totals)), key=totals.__getitem__)]


def aggregate_steps(step_scores: Sequence[float], how: str) -> float:
    """One score for a candidate from the process-reward-model scores of its steps (Lightman et al. 2024, appendix).

    | how       | score                                                                                 |
    |-----------|---------------------------------------------------------------------------------------|
    | "last"    | of the final step: the paper's best-of-N                                              |
    | "min"     | of the worst step                                                                     |
    | "product" | of all steps, the probability that every step is right; scores must be in [0, 1]      |
    | "mean"    | sum over steps / number of steps                                                      |

    A product below about 1e-308 loses digits and then is 0.0: beyond some hundreds of poor steps, use another one.
    Raises ValueError for no steps, a score that is not finite, an unknown ``how``, or one outside [0, 1] in a product.
    """
    if how not in STEP_AGGREGATIONS:
        raise ValueError(f"how is {how!r}, expected one of {', '.join(STEP_AGGREGATIONS)}")
    scores = [float(score) for score in step_scores]
    if not scores or not all(map(math.isfinite, scores)):
        raise ValueError(f"step_scores are {scores}, expected at least one, all finite")
    if how == "last":
        return scores[-1]
    if how == "min":
        return min(scores)
    if how == "mean":
        return math.fsum(scores) / len(scores)
    if not all(0 <= score <= 1 for score in scores):
        raise ValueError(f"step_scores are {scores}, expected numbers in [0, 1] for a product")
    return math.prod(scores)
