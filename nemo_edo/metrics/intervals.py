"""Confidence intervals: over problems by the bootstrap, over seeds by Student's t."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nemo_edo.metrics.whole_number import whole_number


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval, in the unit of the values."""

    mean: float
    """The estimate itself, from all of the data."""
    low: float
    """The lower end; NaN where one value gives none."""
    high: float
    """The upper end."""


def bootstrap_ratio(
    sums_P: ArrayLike, counts_P: ArrayLike, *, resamples: int, seed: int, level: float = 0.95
) -> Interval:
    """sum(sums) / sum(counts) with its percentile bootstrap over problems (Efron and Tibshirani 1993, section 13.3).

    sums_P, counts_P: for each problem, for example correct responses and responses. A resample that happens to hold
    counts of zero only has no ratio and is left out. One problem gives an interval without width: nothing is known of
    how problems differ.
    Raises ValueError for shapes that differ, values that are not finite, negative counts, counts that add up to 0 (in
    the data, or in every resample), resamples below 1, and a level outside (0, 1).
    """
    return bootstrap_ratios([(sums_P, counts_P)], resamples=resamples, seed=seed, level=level)[0]


def bootstrap_ratios(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], *, resamples: int, seed: int, level: float = 0.95
) -> list[Interval]:
    """``bootstrap_ratio`` of each (sums [P], counts [P]), all over the same resamples of the same P problems.

    Arguments as for ``bootstrap_ratio``. Raises ValueError as that does, and for pairs of different P.
    """
    data = [ratio_data(sums_P, counts_P) for sums_P, counts_P in pairs]
    check_same_problems(data)
    ratios = _resampled_ratios(data, resamples, seed) if data else []
    return [_percentiles(_ratio(*pair), ratios_R, level) for pair, ratios_R in zip(data, ratios, strict=True)]


def paired_bootstrap(
    sums_a: ArrayLike,
    counts_a: ArrayLike,
    sums_b: ArrayLike,
    counts_b: ArrayLike,
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """The ratio of a minus that of b; each resample takes the same problems for both. Otherwise ``bootstrap_ratio``."""
    a, b = ratio_data(sums_a, counts_a, "_a"), ratio_data(sums_b, counts_b, "_b")
    check_both_problems(a, b)
    ratios_a, ratios_b = _resampled_ratios([a, b], resamples, seed)
    return _percentiles(_ratio(*a) - _ratio(*b), ratios_a - ratios_b, level)


def check_same_problems(data: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Raises ValueError for pairs (sums [P], counts [P]) of different P."""
    sizes = {len(sums_P) for sums_P, _ in data}
    if len(sizes) > 1:
        raise ValueError(f"the pairs are of {sorted(sizes)} problems, expected the same problems in all")


def check_both_problems(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> None:
    """Raises ValueError where a and b, each (sums [P], counts [P]), are of different P."""
    if len(a[0]) != len(b[0]):
        raise ValueError(f"a has {len(a[0])} problems and b {len(b[0])}, expected the same problems in both")


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of independent values, one for each seed, with Student's t interval (1908); from one value the ends are NaN.

    Raises ValueError for no values, values that are not finite, or a level outside (0, 1).
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"values are {values!r}, expected at least one number, all finite")
    mean = float(data.mean())
    if data.size == 1:
        check_level(level)
        return Interval(mean, math.nan, math.nan)
    half = student_t_quantile(level, data.size - 1) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return Interval(mean, mean - half, mean + half)


def mean_p_value(values: Sequence[float]) -> float:
    """Two-sided p-value of a mean of 0: Student's t test of independent values, one for each seed; NaN for one value.

    Values that are all equal give 0, or 1 where they are 0. Raises ValueError as ``mean_interval`` does.
    """
    mean = mean_interval(values).mean
    if len(values) == 1:
        return math.nan
    deviation = float(np.std(np.asarray(values, dtype=np.float64), ddof=1))
    if deviation == 0:
        return float(mean == 0)
    # theta = atan(t / sqrt(degrees)), with t = mean / (deviation / sqrt(n))
    theta = math.atan(abs(mean) / deviation * math.sqrt(len(values) / (len(values) - 1)))
    return max(1 - _probability_within(theta, len(values) - 1), 0.0)


def student_t_quantile(level: float, degrees: int) -> float:
    """The t with P(|T| <= t) = level for Student's t with an integer number of degrees of freedom, at least 1.

    With theta = atan(t / sqrt(degrees)), that probability is a finite series in cos(theta) (Abramowitz and Stegun
    1964, 26.7.3 and 26.7.4), which grows with theta: bisected on (0, pi / 2).
    """
    check_level(level)
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # halves the width to below a double's resolution
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _probability_within(theta: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) * tan(theta))."""
    cosine_squared, odd = math.cos(theta) ** 2, degrees % 2
    term = math.cos(theta) if odd else 1.0
    series = 0.0
    for step in range(1, degrees // 2 + 1):  # odd: cos + 2/3 cos^3 + 2/3 4/5 cos^5 ...; even: 1 + 1/2 cos^2 + ...
        series += term
        term *= cosine_squared * (2 * step - 1 + odd) / (2 * step + odd)
    inside = math.sin(theta) * series
    return 2 / math.pi * (theta + inside) if odd else inside


def ratio_data(sums_P: ArrayLike, counts_P: ArrayLike, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
    sums, counts = np.asarray(sums_P, dtype=np.float64), np.asarray(counts_P, dtype=np.float64)
    names = f"sums{suffix} {sums.shape} and counts{suffix} {counts.shape}"
    if sums.ndim != 1 or sums.shape != counts.shape:
        raise ValueError(f"{names} must both have one entry for each problem")
    if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
        raise ValueError(f"{names} must be finite")
    if (counts < 0).any() or counts.sum() == 0:
        raise ValueError(f"{names}: counts must be at least 0 and not all 0")
    return sums, counts


def _ratio(sums_P: np.ndarray, counts_P: np.ndarray) -> float:
    return sums_P.sum() / counts_P.sum()


def _resampled_ratios(data: Sequence[tuple[np.ndarray, np.ndarray]], resamples: int, seed: int) -> list[np.ndarray]:
    """For each (sums [P], counts [P]) its [R] ratios, over the same resamples; NaN where the counts add up to 0."""
    resamples = whole_number("resamples", resamples, least=1)
    num_problems = len(data[0][0])
    probabilities_P, rng = np.full(num_problems, 1 / num_problems), np.random.default_rng(seed)
    ratios = [np.full(resamples, np.nan) for _ in data]
    for rows in chunks(resamples, num_problems):
        # How often each resample holds each problem.
        weights_RP = rng.multinomial(num_problems, probabilities_P, size=rows.stop - rows.start)
        for (sums_P, counts_P), ratios_R in zip(data, ratios, strict=True):
            totals_R = weights_RP @ counts_P
            np.divide(weights_RP @ sums_P, totals_R, out=ratios_R[rows], where=totals_R > 0)
    return ratios


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that together cover the rows, each of at most about 2^20 numbers (8 MiB), and of one row at least."""
    size = max(2**20 // columns, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _percentiles(estimate: float, resampled_R: np.ndarray, level: float) -> Interval:
    check_level(level)
    if np.isnan(resampled_R).all():
        raise ValueError(f"counts add up to 0 in each of the {len(resampled_R)} resamples: more are needed")
    low, high = np.nanquantile(resampled_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high))


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, expected a number between 0 and 1, for example 0.95")
