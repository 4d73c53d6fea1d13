"""Confidence intervals of shares: proportions, and means over problems of numbers between 0 and 1.

The percentile bootstrap does not cover where successes are rare: with none among 30 problems it has no width. These
intervals know that a share lies between 0 and 1, and so what the problems that were not asked may hold.

Of a proportion they are those of Clopper and Pearson (1934), which cover at least as often as they say. Of a mean they
are Gaffke's (2005), which generalise them: each problem gets a random weight, all of them a point of the flat Dirichlet
distribution, and one problem more than there are is among them, with the result 0 for the lower end and 1 for the upper
one; the ends are quantiles of the weighted means. Where every result is 0 or 1 the weighted means have Clopper and
Pearson's beta distributions. That they cover for every distribution on [0, 1] is a conjecture (Learned-Miller and
Thomas 2019) that no simulation has contradicted; ``docs/evaluation.md`` has ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincinv

from nemo_edo.metrics.intervals import Interval, Ratio, check_level, chunks, ratio_data, whole_number

LEAST_GAP = 0.5
"""The least difference of two policies on a problem that was not asked. In simulations of 30 problems the interval then
covers where that of a t test does not, and excludes 0 for gains that hold on most problems."""


def proportion_interval(successes: int, trials: int, level: float = 0.95) -> Interval:
    """successes / trials with the interval of Clopper and Pearson (1934).

    Raises ValueError unless 0 <= successes <= trials and trials >= 1, and for a level outside (0, 1).
    """
    check_level(level)
    trials = whole_number("trials", trials, least=1)
    successes = whole_number("successes", successes, least=0)
    if successes > trials:
        raise ValueError(f"successes is {successes}, expected at most trials = {trials}")
    tail, failures = (1 - level) / 2, trials - successes
    low = float(betaincinv(successes, failures + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - tail)) if failures else 1.0
    return Interval(successes / trials, low, high)


def share_interval(
    sums_P: ArrayLike, counts_P: ArrayLike, *, resamples: int, seed: int, level: float = 0.95
) -> Interval:
    """sum(sums) / sum(counts), a share, with its interval over problems, which is within [0, 1] (Gaffke 2005).

    sums_P, counts_P: for each problem, for example right responses and responses; a problem whose count is 0 says
    nothing. Exact where every problem has one count and is right or wrong as a whole, otherwise from ``resamples``
    random weights, fixed by ``seed``.
    Raises ValueError for shapes that differ, values that are not finite, sums outside 0 to their count, counts that
    add up to 0, resamples below 1, and a level outside (0, 1).
    """
    return share_intervals([(sums_P, counts_P)], resamples=resamples, seed=seed, level=level)[0]


def share_intervals(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], *, resamples: int, seed: int, level: float = 0.95
) -> list[Interval]:
    """``share_interval`` of each (sums [P], counts [P]), all over the same weights of the same P problems.

    Arguments as for ``share_interval``. Raises ValueError as that does, and for pairs of different P.
    """
    check_level(level)
    data = list(zip(*_share_data(*pairs), strict=True)) if pairs else []
    exact = []  # where the problems that count have one count, and are right or wrong as a whole
    for sums_P, counts_P in data:
        counts = counts_P[counts_P > 0]
        whole = (counts == counts[0]).all() and np.isin(sums_P, (0.0, counts[0])).all()
        exact.append(proportion_interval(int((sums_P > 0).sum()), len(counts), level) if whole else None)
    others = [pair for pair, known in zip(data, exact, strict=True) if known is None]
    weighted = zip(others, *_weighted(others, resamples, seed), strict=True) if others else iter([])
    by_weights = (_between(sums.sum() / counts.sum(), low, high, level) for (sums, counts), low, high in weighted)
    return [known or next(by_weights) for known in exact]


def paired_share_interval(
    sums_a: ArrayLike,
    counts_a: ArrayLike,
    sums_b: ArrayLike,
    counts_b: ArrayLike,
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """The share of a minus that of b on the same problems, with its interval, which is within [-1, 1].

    The same weights for both. On the problem more, a and b differ by the largest difference on any problem, by
    ``LEAST_GAP`` at least, and by 1 where no problem tells them apart: with 1 throughout, no difference would be found
    on 30 problems. Otherwise ``share_interval``.
    """
    check_level(level)
    sums_MP, counts_MP = _share_data((sums_a, counts_a), (sums_b, counts_b))
    both = (counts_MP > 0).all(axis=0)
    gaps = np.abs(np.subtract(*(sums_MP[:, both] / counts_MP[:, both])))
    largest = min(max(gaps.max(), LEAST_GAP), 1.0) if gaps.any() else 1.0
    (lower_a, lower_b), (upper_a, _) = _weighted(list(zip(sums_MP, counts_MP, strict=True)), resamples, seed)
    gap_R, more_R = lower_a - lower_b, largest * (upper_a - lower_a)
    mean_a, mean_b = sums_MP.sum(axis=1) / counts_MP.sum(axis=1)
    return _between(mean_a - mean_b, gap_R - more_R, gap_R + more_R, level)


def mean_of_shares(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], *, resamples: int, seed: int, level: float = 0.95
) -> Interval:
    """The plain mean of sum(sums) / sum(counts) over separate sets of problems, such as benchmarks: the weights of one
    set are independent of the others'. Otherwise ``share_interval``."""
    check_level(level)
    data = [tuple(values[0] for values in _share_data(pair)) for pair in pairs]
    ends = [_weighted([one], resamples, [seed, place]) for place, one in enumerate(data)]
    lower_R, upper_R = (np.mean(found, axis=0)[0] for found in zip(*ends, strict=True))
    return _between(float(np.mean([sums.sum() / counts.sum() for sums, counts in data])), lower_R, upper_R, level)


def _weighted(data: Sequence[Ratio], resamples: int, seed: int | list[int]) -> tuple[np.ndarray, np.ndarray]:
    """[M, R] twice: the weighted means of M ratios over the same problems with a problem more that is wrong, and with
    one that is right. That problem has the mean count of those that count."""
    resamples = whole_number("resamples", resamples, least=1)
    sums_PM, counts_PM = (np.stack(arrays, axis=1) for arrays in zip(*data, strict=True))
    one_more_M = counts_PM.sum(axis=0) / (counts_PM > 0).sum(axis=0)
    rng = np.random.default_rng(seed)
    lower_RM, upper_RM = np.empty((2, resamples, len(data)))
    for rows in chunks(resamples, len(sums_PM) + 1):
        # Exponential numbers, divided by their sum, are a point of the flat Dirichlet distribution.
        weights = rng.standard_exponential((rows.stop - rows.start, len(sums_PM) + 1))
        more = weights[:, -1:] * one_more_M
        sums_RM, counts_RM = weights[:, :-1] @ sums_PM, weights[:, :-1] @ counts_PM + more
        lower_RM[rows], upper_RM[rows] = sums_RM / counts_RM, (sums_RM + more) / counts_RM
    return lower_RM.T, upper_RM.T


def _between(mean: float, lower_R: np.ndarray, upper_R: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(lower_R, (1 - level) / 2), np.quantile(upper_R, (1 + level) / 2)
    return Interval(float(mean), float(low), float(high))


def _share_data(*pairs: tuple[ArrayLike, ArrayLike]) -> Ratio:
    sums_MP, counts_MP = ratio_data(*pairs)
    rounding = 1e-9 * counts_MP
    if (sums_MP < -rounding).any() or (sums_MP > counts_MP + rounding).any():
        raise ValueError("sums must be between 0 and counts for shares")
    return sums_MP, counts_MP
