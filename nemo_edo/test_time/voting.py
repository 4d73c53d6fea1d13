"""Votes over the final answers of several responses (self-consistency, Wang et al. 2023).

Answers are compared by equality, so they come in canonical form; None is an abstention.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import TypeVar

from nemo_edo.metrics.pass_at_k import expected_vote_score

__all__ = ["expected_vote_score", "majority_vote", "weighted_vote"]

Answer = TypeVar("Answer", bound=Hashable)


def majority_vote(answers: Sequence[Answer | None]) -> Answer | None:
    """The most frequent answer, the first seen among equals; None if all abstain."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__, default=None)


def weighted_vote(answers: Sequence[Answer | None], weights: Sequence[float]) -> Answer | None:
    """The answer with the largest total weight, the first seen among equals; None if all abstain.

    Raises ValueError if there is not one weight for each answer, or a weight is negative or not finite.
    """
    if len(answers) != len(weights):
        raise ValueError(f"{len(weights)} weights for {len(answers)} answers, expected one for each")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights are {list(weights)}, expected finite numbers of at least 0")
    ballots: dict[Answer, list[float]] = defaultdict(list)
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            ballots[answer].append(weight)
    # fsum rounds once, so that the order of the answers cannot make or break a tie.
    return max(ballots, key=lambda answer: math.fsum(ballots[answer]), default=None)
