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
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import ArrayLike

from nemo_edo.metrics.pass_at_k import pass_at_k

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
    scores, rewards: [n].
    """
    _, tied_n, sizes = np.unique(-np.asarray(scores), return_inverse=True, return_counts=True)  # the highest first
    means = np.bincount(tied_n, weights=np.asarray(rewards)) / sizes
    return _shares_of_ranks(len(tied_n)) @ np.repeat(means, sizes)


def sample_circles(num_samples: int, subsets: int, rng: np.random.Generator) -> np.ndarray:
    """[C, n] permutations of the n responses, the orders whose windows votes are averaged over: as many as give at
    least ``subsets`` windows of each size. With the same ones, votes on a problem differ by their rule alone."""
    return rng.permuted(np.tile(np.arange(num_samples), (-(-subsets // num_samples), 1)), axis=1)


def vote_curve(
    answers: Sequence[Hashable | None], right: Sequence[bool], circles: np.ndarray, weights: ArrayLike | None = None
) -> np.ndarray:
    """[K] the probability that a vote of k is right, ties broken at random (``metrics.vote_success``).

    The answer with the most votes wins, or with ``weights`` the one with the largest total weight among those that
    have votes. None is an abstention: it is sampled but has no vote. An answer counts with the share of its responses
    that are right. weights: [n], at least 0, for example a reward model's scores.
    """
    n = circles.shape[1]
    weights_n = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
    classes, right_A = _classes(answers, right)
    if not right_A.any():
        return np.zeros(n)
    votes_nA = np.zeros((n, len(right_A)), dtype=np.int32)
    voting = np.flatnonzero(classes >= 0)
    votes_nA[voting, classes[voting]] = 1
    total = np.zeros(n)
    for order in circles:
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
    return total / len(circles)


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
