"""Two runs on the same problems, or two raters of the same answers: which problems changed, how likely chance alone
would do it, and how far the raters agree.

A run's results are a sequence, one entry for each problem in the same order for both, or a mapping from problem id to
result, in any order.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike

from nemo_edo.metrics import intervals

Results = ArrayLike | Mapping[Hashable, float]
"""[P], or a mapping by problem id."""


@dataclass(frozen=True)
class SolvedAndLost:
    """The problems, by what became of them: their ids, or their positions from 0 where results have no ids."""

    newly_solved: tuple[Hashable, ...]
    """Wrong before, right after."""
    lost: tuple[Hashable, ...]
    """Right before, wrong after."""
    kept: tuple[Hashable, ...]
    """Right before and after."""
    unsolved: tuple[Hashable, ...]
    """Wrong before and after."""


def solved_and_lost(before: Results, after: Results) -> SolvedAndLost:
    """Each problem under newly solved, lost, kept or unsolved, in the order of ``before``.

    before, after: for each problem whether it was solved (bool, or 0 and 1).
    Raises ValueError for problems that differ, no problem, and anything but 0 and 1.
    """
    problems, before_P, after_P = _paired(before, after, binary=True)

    def those(was: bool, became: bool) -> tuple[Hashable, ...]:
        return tuple(problems[i] for i in np.flatnonzero((before_P == was) & (after_P == became)).tolist())

    return SolvedAndLost(
        newly_solved=those(False, True), lost=those(True, False), kept=those(True, True), unsolved=those(False, False)
    )


def mcnemar(correct_a: Results, correct_b: Results) -> float:
    """Two-sided p-value of equal accuracy of a and b: McNemar's test (1947) in its exact, binomial form.

    Only the problems count that one of the two alone solved, n_a and n_b: if neither is better, each is a coin's toss.
    p = min(1, 2 P(X <= min(n_a, n_b))), X ~ Binomial(n_a + n_b, 1/2); 1.0 where there is no such problem.
    correct_a, correct_b and errors: as for ``solved_and_lost``.
    """
    _, a_P, b_P = _paired(correct_a, correct_b, binary=True)
    only_a, only_b = int((a_P > b_P).sum()), int((b_P > a_P).sum())
    return min(1.0, float(2 * scipy.special.bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def paired_permutation_test(values_a: Results, values_b: Results, *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of equal means of a and b on the same problems, by flipping signs of differences (Fisher 1935).

    values_a, values_b: one finite number for each problem. If a and b could be exchanged on every problem, each sign
    pattern of the differences d_P would be as likely: p is the share of patterns with |sum of +-d| >= |sum of d|.
    Where 2^P patterns of the P differences other than 0 are not more than ``resamples``, all are enumerated and p is
    exact; otherwise p = (1 + hits) / (1 + resamples) over random patterns (Phipson and Smyth 2010), fixed by ``seed``.
    Raises ValueError for problems that differ, no problem, values that are not finite, and resamples below 1.
    """
    resamples = intervals.whole_number("resamples", resamples, least=1)
    _, a_P, b_P = _paired(values_a, values_b)
    differences_P = (a_P - b_P)[a_P != b_P]  # a sign does not change 0
    total, size = differences_P.sum(), len(differences_P)
    # Sums that are equal but for the order of their roundings count as equal.
    extreme = abs(total) - 1e-12 * np.abs(differences_P).sum()
    exact = size < 63 and 2**size <= resamples
    num_patterns = 2**size if exact else resamples
    rng, hits = np.random.default_rng(seed), 0
    for rows in intervals.chunks(num_patterns, max(size, 1)):
        if exact:
            flipped_RP = np.arange(rows.start, rows.stop)[:, None] >> np.arange(size) & 1
        else:
            flipped_RP = rng.integers(0, 2, size=(rows.stop - rows.start, size), dtype=np.int8)
        hits += int((np.abs(total - 2 * (flipped_RP @ differences_P)) >= extreme).sum())
    return hits / num_patterns if exact else (1 + hits) / (1 + num_patterns)


def paired_difference(
    sums_a: ArrayLike,
    counts_a: ArrayLike,
    sums_b: ArrayLike,
    counts_b: ArrayLike,
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
    share: bool = True,
) -> tuple[intervals.Interval, float]:
    """The ratio of a minus that of b on the same problems, with its interval, and the two-sided p-value of none: one
    test, so that the p-value is at most 1 - level exactly where the interval leaves out 0.

    The test is ``paired_permutation_test`` of the differences d_P minus a shift, in which ratios are linear; the
    interval has the shifts that it does not reject. Flipping the signs of a set of problems rejects a shift below the
    mean unless the set's mean difference, or the others', is below the shift too, so that the ends are quantiles of the
    means of random halves (Hartigan 1969). With fewer than six problems whose shares differ (at level 0.95) no shift
    could be rejected: the interval has 0, and with one or two it is that of ``paired_share_interval`` (of what is no
    ``share``: the bootstrap's). Raises ValueError as these do.
    """
    intervals.check_level(level)
    resamples = intervals.whole_number("resamples", resamples, least=1)
    sums_MP, counts_MP = intervals.ratio_data((sums_a, counts_a), (sums_b, counts_b))
    totals_M = counts_MP.sum(axis=1)
    ratios_M = sums_MP.sum(axis=1) / totals_M
    asked = (counts_MP > 0).any(axis=0)
    parts_MP = (sums_MP - ratios_M[:, None] * counts_MP)[:, asked] / totals_M[:, None]
    mean = float(ratios_M[0] - ratios_M[1])
    d_P = mean + asked.sum() * (parts_MP[0] - parts_MP[1])
    rounding = 1e-12 * max(np.abs(d_P).max(), 1e-300)
    lower_R, upper_R = _means_of_halves(d_P, resamples, seed)
    lower_R, upper_R = lower_R - rounding, upper_R + rounding
    hits = int((lower_R <= 0).sum() if mean > 0 else (upper_R >= 0).sum()) if abs(mean) > rounding else resamples
    # Shares that differ: with counts that do, d_P of a problem with equal shares is not 0.
    cross_P = sums_MP[0] * counts_MP[1], sums_MP[1] * counts_MP[0]
    is_other_P = ~np.isclose(*cross_P, rtol=1e-12, atol=0.0) | (counts_MP == 0).any(axis=0)
    different = int((is_other_P[asked] & (np.abs(d_P) > rounding)).sum())
    fewest = 1 + math.ceil(-math.log2(1 - level) - 1e-9)
    p = min(1.0, max((1 + hits) / (1 + resamples), 2.0 ** (1 - different)))  # no sign pattern is rarer
    rank = int((1 - level) * (1 + resamples) + 1e-9)
    low, high = (np.sort(lower_R)[rank - 1], np.sort(upper_R)[-rank]) if rank else (lower_R.min(), upper_R.max())
    if different < fewest:
        if different < 3:
            of = intervals.paired_share_interval if share else intervals.paired_bootstrap
            few = of(sums_a, counts_a, sums_b, counts_b, resamples=resamples, seed=seed, level=level)
            low, high = few.low, few.high
        low, high, p = min(low, 0.0), max(high, 0.0), max(p, 1 - level)
    most = 1.0 if share else math.inf
    return intervals.Interval(mean, float(np.clip(low, -most, mean)), float(np.clip(high, mean, most))), p


def _means_of_halves(d_P: np.ndarray, resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[R] twice: the smaller and the larger of the means of a random set of problems and of the others."""
    size, total, rng = len(d_P), d_P.sum(), np.random.default_rng(seed)
    lower_R, upper_R = np.empty((2, resamples))
    for rows in intervals.chunks(resamples, size):
        inside = rng.integers(0, 2, size=(rows.stop - rows.start, size), dtype=np.int8)
        count, part = inside.sum(axis=1, dtype=np.int64), inside @ d_P
        sets = part / np.maximum(count, 1), (total - part) / np.maximum(size - count, 1)
        empty = (count == 0) | (count == size)  # its mean is that of all, or nothing
        lower_R[rows] = np.where(empty, d_P.min(), np.minimum(*sets))
        upper_R[rows] = np.where(empty, d_P.max(), np.maximum(*sets))
    return lower_R, upper_R


def holm(p_values: ArrayLike) -> np.ndarray:
    """[K] p-values of K comparisons, adjusted so that all of them together err with the chosen level (Holm 1979).

    The i-th smallest of K becomes the largest of (K - j + 1) p_(j) over j <= i, at most 1; the order of ``p_values``
    is kept. Raises ValueError for other shapes than [K], and anything outside [0, 1].
    """
    p_K = np.asarray(p_values, dtype=np.float64)
    if p_K.ndim != 1 or not ((p_K >= 0) & (p_K <= 1)).all():
        raise ValueError(f"p_values are {p_values!r}, expected numbers in [0, 1]")
    order = np.argsort(p_K, kind="stable")
    adjusted_K = np.empty_like(p_K)
    adjusted_K[order] = np.minimum(np.maximum.accumulate(p_K[order] * np.arange(len(p_K), 0, -1)), 1.0)
    return adjusted_K


def cohen_kappa(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Cohen's kappa (1960) of two raters' yes and no: (p_o - p_e) / (1 - p_e).

    p_o is the share on which they agree, p_e what they would agree on if each said yes as often, but independently.
    both, only_first, only_second, neither: how many things each of the pairs of verdicts was given to. 1.0 where both
    say the same of everything, also if that is one and the same answer, where the quotient is 0 / 0.
    Raises ValueError for counts that are negative or all 0.
    """
    total = sum(intervals.whole_number("a count", count, least=0) for count in (both, only_first, only_second, neither))
    if total == 0:
        raise ValueError("all counts are 0: nothing was rated")
    first, second = both + only_first, both + only_second
    expected = first * second + (total - first) * (total - second)  # times total squared
    observed = (both + neither) * total
    return 1.0 if observed == total**2 else (observed - expected) / (total**2 - expected)


def _paired(a: Results, b: Results, *, binary: bool = False) -> tuple[Sequence[Hashable], np.ndarray, np.ndarray]:
    """The problems, and both results as float64 [P] in the same order; ``binary``: only 0 and 1 are results."""
    if isinstance(a, Mapping) != isinstance(b, Mapping):
        raise ValueError("one of the two is a mapping by problem id, expected both or neither")
    problems: Sequence[Hashable] = []
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if differing := a.keys() ^ b.keys():
            raise ValueError(
                f"{len(differing)} problems are in one of the two only: {', '.join(sorted(map(repr, differing))[:5])}"
            )
        problems, a, b = list(a), list(a.values()), [b[problem] for problem in a]
    a_P, b_P = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a_P.ndim != 1 or a_P.shape != b_P.shape or a_P.size == 0:
        raise ValueError(f"{a_P.shape} and {b_P.shape} must both have one entry for each problem")
    problems = problems or range(a_P.size)
    for values_P in (a_P, b_P):
        wrong = np.flatnonzero(~np.isin(values_P, (0, 1)) if binary else ~np.isfinite(values_P))
        if wrong.size:
            expected = "True or False" if binary else "a finite number"
            raise ValueError(f"{values_P[wrong[0]]} at problem {problems[wrong[0]]!r}, expected {expected}")
    return problems, a_P, b_P
