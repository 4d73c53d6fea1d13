"""Confidence intervals: over problems by the bootstrap, of shares by Gaffke's weights, over seeds by Student's t.

The percentile bootstrap does not cover where successes are rare: with none among 30 problems it has no width. The
intervals of shares know that a share lies between 0 and 1, and so what the problems that were not asked may hold.

Of a proportion they are those of Clopper and Pearson (1934), which cover at least as often as they say. Of a mean they
are Gaffke's (2005), which generalise them: each problem gets a random weight, all of them a point of the flat Dirichlet
distribution, and one problem more than there are is among them, with the result 0 for the lower end and 1 for the upper
one; the ends are quantiles of the weighted means. Where every result is 0 or 1 the weighted means have Clopper and
Pearson's beta distributions. That they cover for every distribution on [0, 1] is a conjecture (Learned-Miller and
Thomas 2019) that no simulation has contradicted; ``docs/evaluation.md`` has ours.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.special when it is used
from numpy.typing import ArrayLike

POWER = 0.8
"""The probability with which a difference that counts as detectable is found."""
Ratio = tuple[np.ndarray, np.ndarray]
"""(sums [P], counts [P]): for each problem, for example right responses and responses."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval, in the unit of the values."""

    mean: float
    low: float
    """The lower end; NaN where one value gives none."""
    high: float


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
    if not pairs:
        return []
    sums_MP, counts_MP = ratio_data(*pairs)
    ratios_MR = _resampled_ratios(sums_MP, counts_MP, resamples, seed)
    estimates_M = sums_MP.sum(axis=1) / counts_MP.sum(axis=1)
    return [_percentiles(*one, level) for one in zip(estimates_M, ratios_MR, strict=True)]


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
    sums_MP, counts_MP = ratio_data((sums_a, counts_a), (sums_b, counts_b))
    ratios_a, ratios_b = _resampled_ratios(sums_MP, counts_MP, resamples, seed)
    mean_a, mean_b = sums_MP.sum(axis=1) / counts_MP.sum(axis=1)
    return _percentiles(mean_a - mean_b, ratios_a - ratios_b, level)


def mean_interval(values: Sequence[float], level: float = 0.95, *, rounding: float = 0.0) -> Interval:
    """Mean of independent values, one for each seed, with Student's t interval (1908); from one value the ends are NaN.

    rounding: the variance of each value's rounding, which is added to the observed one: means over a hundred problems
    go by hundredths, and trainings that differ can tie. It is g^2 / 12 for values with steps of g, and g^2 / 6 for
    differences of two of them.
    Raises ValueError for no values, values that are not finite, or a level outside (0, 1).
    """
    check_level(level)
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"values are {values!r}, expected at least one number, all finite")
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, math.nan, math.nan)
    half = float(scipy.special.stdtrit(data.size - 1, (1 + level) / 2) * _standard_error(values, rounding))
    return Interval(mean, mean - half, mean + half)


def mean_p_value(values: Sequence[float], *, rounding: float = 0.0) -> float:
    """Two-sided p-value of a mean of 0: Student's t test of independent values, one for each seed; NaN for one value.

    Without ``rounding`` (``mean_interval``), values that are all equal give 0, or 1 where they are 0. Raises ValueError
    as ``mean_interval`` does.
    """
    mean, error = mean_interval(values).mean, _standard_error(values, rounding)
    return float(mean == 0) if error == 0 else float(2 * scipy.special.stdtr(len(values) - 1, -abs(mean) / error))


def detectable(values: Sequence[float], *, level: float = 0.05, power: float = POWER, rounding: float = 0.0) -> float:
    """The minimum detectable effect: the least true mean that the t test of ``mean_p_value`` at ``level`` finds with
    probability ``power``, for as many values as these with their standard deviation; NaN for one value. rounding: as
    for ``mean_interval``.

    From the noncentral t distribution. Raises ValueError as ``mean_interval`` does.
    """
    mean_interval(values)
    error = _standard_error(values, rounding)
    least = scipy.special.stdtrit(len(values) - 1, 1 - level / 2)
    return float(error * scipy.special.nctdtrinc(len(values) - 1, 1 - power, least))


def _standard_error(values: Sequence[float], rounding: float) -> float:
    if len(values) < 2:
        return math.nan
    return math.sqrt(float(np.var(values, ddof=1)) + rounding) / math.sqrt(len(values))


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, expected a number between 0 and 1, for example 0.95")


def ratio_data(*pairs: tuple[ArrayLike, ArrayLike]) -> Ratio:
    """[M, P] the sums and the counts of M ratios over the same P problems. Raises ValueError where they are not."""
    data = [tuple(np.asarray(values, dtype=np.float64) for values in pair) for pair in pairs]
    for sums, counts in data:
        names = f"sums {sums.shape} and counts {counts.shape}"
        if sums.ndim != 1 or sums.shape != counts.shape:
            raise ValueError(f"{names} must both have one entry for each problem")
        if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
            raise ValueError(f"{names} must be finite")
        if (counts < 0).any() or counts.sum() == 0:
            raise ValueError(f"{names}: counts must be at least 0 and not all 0")
    if len(sizes := {len(sums) for sums, _ in data}) > 1:
        raise ValueError(f"the pairs are of {sorted(sizes)} problems, expected the same problems in all")
    return np.stack([sums for sums, _ in data]), np.stack([counts for _, counts in data])


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that together cover the rows, each of at most about 2^20 numbers (8 MiB), and of one row at least."""
    size = max(2**20 // columns, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _resampled_ratios(sums_MP: np.ndarray, counts_MP: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """[M, R] the ratios of each resample; NaN where the counts add up to 0."""
    num_problems = sums_MP.shape[1]
    probabilities_P, rng = np.full(num_problems, 1 / num_problems), np.random.default_rng(seed)
    ratios_MR = np.full((len(sums_MP), whole_number("resamples", resamples, least=1)), np.nan)
    for rows in chunks(resamples, num_problems):
        # How often each resample holds each problem.
        weights_PR = rng.multinomial(num_problems, probabilities_P, size=rows.stop - rows.start).T
        totals_MR = counts_MP @ weights_PR
        np.divide(sums_MP @ weights_PR, totals_MR, out=ratios_MR[:, rows], where=totals_MR > 0)
    return ratios_MR


def _percentiles(estimate: float, resampled_R: np.ndarray, level: float) -> Interval:
    check_level(level)
    if np.isnan(resampled_R).all():
        raise ValueError(f"counts add up to 0 in each of the {len(resampled_R)} resamples: more are needed")
    low, high = np.nanquantile(resampled_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high))


def whole_number(name: str, value: int, *, least: int | None = None) -> int:
    """``value`` as a Python int; NumPy's integers are welcome.

    Raises ValueError for a bool or a float, which are not counts even where their value is whole, and below ``least``.
    """
    expected = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected {expected}") from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise ValueError(f"{name} is {value!r}, expected {expected}")
    return number


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
    low = float(scipy.special.betaincinv(successes, failures + 1, tail)) if successes else 0.0
    high = float(scipy.special.betaincinv(successes + 1, failures, 1 - tail)) if failures else 1.0
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
