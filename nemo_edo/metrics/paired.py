"""Two runs on the same problems, or two raters of the same answers: which problems changed, how likely chance alone
would do it, and how far the raters agree.

A run's results are a sequence, one entry for each problem in the same order for both, or a mapping from problem id to
result, in any order. The bootstrap interval of the difference is ``intervals.paired_bootstrap``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr

from nemo_edo.metrics.intervals import chunks
from nemo_edo.metrics.whole_number import whole_number

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
    return min(1.0, float(2 * bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def paired_permutation_test(values_a: Results, values_b: Results, *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of equal means of a and b on the same problems, by flipping signs of differences (Fisher 1935).

    values_a, values_b: one finite number for each problem. If a and b could be exchanged on every problem, each sign
    pattern of the differences d_P would be as likely: p is the share of patterns with |sum of +-d| >= |sum of d|.
    Where 2^P patterns of the P differences other than 0 are not more than ``resamples``, all are enumerated and p is
    exact; otherwise p = (1 + hits) / (1 + resamples) over random patterns (Phipson and Smyth 2010), fixed by ``seed``.
    Raises ValueError for problems that differ, no problem, values that are not finite, and resamples below 1.
    """
    resamples = whole_number("resamples", resamples, least=1)
    _, a_P, b_P = _paired(values_a, values_b)
    differences_P = (a_P - b_P)[a_P != b_P]  # a sign does not change 0
    total, size = differences_P.sum(), len(differences_P)
    # Sums that are equal but for the order of their roundings count as equal.
    extreme = abs(total) - 1e-12 * np.abs(differences_P).sum()
    exact = size < 63 and 2**size <= resamples
    num_patterns = 2**size if exact else resamples
    rng, hits = np.random.default_rng(seed), 0
    for rows in chunks(num_patterns, max(size, 1)):
        if exact:
            flipped_RP = np.arange(rows.start, rows.stop)[:, None] >> np.arange(size) & 1
        else:
            flipped_RP = rng.integers(0, 2, size=(rows.stop - rows.start, size), dtype=np.int8)
        hits += int((np.abs(total - 2 * (flipped_RP @ differences_P)) >= extreme).sum())
    return hits / num_patterns if exact else (1 + hits) / (1 + num_patterns)


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
    total = sum(whole_number("a count", count, least=0) for count in (both, only_first, only_second, neither))
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
