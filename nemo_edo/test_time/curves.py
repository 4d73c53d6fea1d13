"""What k of a problem's n stored responses are worth, for every k from 1 to n: pass@k, best-of-k, votes of k.

Every curve is the mean over all subsets of k of the n responses: no subset is preferred, and
a curve from one sampling pass is unbiased at each k. Pass@k and best-of-k have closed forms. Votes have none that is
cheap, so they are averaged over windows of random circles: the responses are put in a circle in random order, and each
of the n windows of k neighbours is one subset. Every subset is as likely as any other, so the mean is unbiased; every
response is in equally many windows, so that k = 1, n - 1 and n are exact; and one circle serves all k at once.

Dimensions: n responses to one problem, K = n sizes of subsets, A different answers, C circles.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import ArrayLike

from nemo_edo.metrics.pass_at_k import pass_at_k
from nemo_edo.metrics.whole_number import whole_number

ROUNDING = 1e-9
"""Share of all responses' weight: totals closer than this are a tie."""


@lru_cache(maxsize=4096)
def pass_curve(num_samples: int, num_correct: int) -> np.ndarray:
    """[K] unbiased pass@k for k = 1 to n = num_samples, of which num_correct are right (``metrics.pass_at_k``);
    read-only."""
    curve = np.array([pass_at_k(num_samples, num_correct, k) for k in range(1, num_samples + 1)])
    curve.flags.writeable = False
    return curve


def best_of_curve(scores: ArrayLike, rewards: ArrayLike) -> np.ndarray:
    """[K] the expected reward of the response with the highest score among k, ties broken at random.

    The response of rank r from the top (0 to n - 1) is the best of C(n - 1 - r, k - 1) of the C(n, k) subsets. Of
    responses with equal scores each is as likely to be chosen, so each counts with their mean reward.
    scores, rewards: [n]. Raises ValueError for other shapes, no response, and numbers that are not finite.
    """
    scores_n, rewards_n = (np.asarray(values, dtype=np.float64) for values in (scores, rewards))
    if scores_n.ndim != 1 or scores_n.shape != rewards_n.shape or scores_n.size == 0:
        raise ValueError(f"scores {scores_n.shape} and rewards {rewards_n.shape} must both have one for each response")
    if not (np.isfinite(scores_n).all() and np.isfinite(rewards_n).all()):
        raise ValueError("scores and rewards must be finite")
    _, tied_n, sizes = np.unique(-scores_n, return_inverse=True, return_counts=True)  # the highest first
    means = np.bincount(tied_n, weights=rewards_n) / sizes
    return _shares_of_ranks(scores_n.size) @ np.repeat(means, sizes)


@dataclass(frozen=True)
class Circles:
    """The orders of n responses whose windows votes are averaged over: the same ones for every vote on a problem, so
    that votes differ by their rule and not by their samples."""

    orders: np.ndarray
    """[C, n] permutations of the n responses."""

    @classmethod
    def sample(cls, num_samples: int, subsets: int, rng: np.random.Generator) -> Circles:
        """As many circles as give at least ``subsets`` windows of each size. Raises ValueError for a number below 1."""
        n, subsets = whole_number("num_samples", num_samples, least=1), whole_number("subsets", subsets, least=1)
        return cls(rng.permuted(np.tile(np.arange(n), (-(-subsets // n), 1)), axis=1))


def vote_curve(
    answers: Sequence[Hashable | None], right: Sequence[bool], circles: Circles, weights: ArrayLike | None = None
) -> np.ndarray:
    """[K] the probability that a vote of k is right, ties broken at random (``metrics.vote_success``).

    The answer with the most votes wins, or with ``weights`` the one with the largest total weight among those that
    have votes. None is an abstention: it is sampled but has no vote. An answer counts with the share of its responses
    that are right. weights: [n], for example a reward model's scores. Raises ValueError for lengths that differ from
    the circles', and weights that are negative or not finite.
    """
    n = circles.orders.shape[1]
    if len(answers) != n or len(right) != n:
        raise ValueError(f"{len(answers)} answers and {len(right)} marks for circles of {n} responses")
    weights_n = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
    if weights_n.shape != (n,) or not (np.isfinite(weights_n) & (weights_n >= 0)).all():
        raise ValueError(f"weights must be {n} finite numbers of at least 0")
    classes, right_A = _classes(answers, right)
    if not right_A.any():
        return np.zeros(n)
    votes_nA = np.zeros((n, len(right_A)), dtype=np.int32)
    voting = np.flatnonzero(classes >= 0)
    votes_nA[voting, classes[voting]] = 1
    total = np.zeros(n)
    for order in circles.orders:
        votes_KnA = _windows(votes_nA[order])
        if weights is None:
            leading = votes_KnA == votes_KnA.max(axis=2, keepdims=True)
        else:
            weight_KnA = _windows((votes_nA * weights_n[:, None])[order])
            leading = weight_KnA >= weight_KnA.max(axis=2, keepdims=True) - ROUNDING * weights_n.sum()
        leading &= votes_KnA > 0
        leaders_Kn = leading.sum(axis=2)
        wins_Kn = (leading @ right_A) / np.maximum(leaders_Kn, 1)
        total += wins_Kn.mean(axis=1)
    return total / len(circles.orders)


def _windows(rows_nA: np.ndarray) -> np.ndarray:
    """[K, n, A] the sums of k neighbours in a circle, for k = 1 to n, from each of the n places on."""
    n = len(rows_nA)
    sums = np.concatenate([np.zeros_like(rows_nA[:1]), np.cumsum(np.concatenate([rows_nA, rows_nA]), axis=0)])
    starts = np.arange(n)
    return sums[starts[None, :] + np.arange(1, n + 1)[:, None]] - sums[starts][None]


def _classes(answers: Sequence[Hashable | None], right: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """[n] the number of each response's answer, -1 for None, and [A] the share of its responses that are right."""
    numbers: dict[Hashable, int] = {}
    classes = np.array([-1 if answer is None else numbers.setdefault(answer, len(numbers)) for answer in answers])
    stated, marks = classes >= 0, np.asarray(right, dtype=np.float64)
    sizes = np.bincount(classes[stated], minlength=len(numbers))
    return classes, np.bincount(classes[stated], weights=marks[stated], minlength=len(numbers)) / sizes


@lru_cache(maxsize=64)
def _shares_of_ranks(n: int) -> np.ndarray:
    """[K, n] the share of the subsets of k whose best response has rank r; integers, divided once."""
    return np.array([[comb(n - 1 - r, k - 1) / comb(n, k) for r in range(n)] for k in range(1, n + 1)])
