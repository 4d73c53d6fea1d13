import math
from statistics import NormalDist

import numpy as np
import pytest

from nemo_edo import metrics


def test_the_bootstrap_of_a_ratio_of_sums_agrees_with_the_delta_methods_closed_form():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 20, size=800)
    sums = rng.binomial(counts, 0.3)
    ratio = sums.sum() / counts.sum()
    half = NormalDist().inv_cdf(0.975) * (sums - ratio * counts).std() / counts.mean() / math.sqrt(800)
    interval = metrics.bootstrap_ratio(sums, counts, resamples=4000, seed=1)
    assert interval.mean == pytest.approx(ratio)
    assert interval.low == pytest.approx(ratio - half, abs=0.05 * half)
    assert interval.high == pytest.approx(ratio + half, abs=0.05 * half)


def test_the_mean_over_three_seeds_has_its_t_interval_and_one_seed_has_none():
    half = 4.302653 / math.sqrt(3)  # standard deviation 1
    interval = metrics.mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-5)
    interval = metrics.mean_interval([0.7])
    assert interval.mean == 0.7 and math.isnan(interval.low) and math.isnan(interval.high)


@pytest.mark.parametrize(("values", "p"), [
    ([1.0, 3.0], 2 / math.pi * math.atan(1 / 2)),  # t = 2 with one degree of freedom: Cauchy's distribution
    ([-1.0, 0.0, -2.0], 1 - math.sqrt(3 / 5)),  # t = -sqrt(3) with two: P(|T| <= t) = t / sqrt(2 + t^2)
    ([0.5, 0.5], 0.0), ([0.0, 0.0], 1.0), ([-1.0, 1.0], 1.0), ([2.0], math.nan),
])
def test_the_p_value_of_a_mean_is_students(values, p):
    assert metrics.mean_p_value(values) == pytest.approx(p, abs=1e-12, nan_ok=True)


def test_values_that_tie_at_a_step_of_a_coarse_metric_have_its_roundings_error():
    """Three differences of one problem more of fifty; and what rounding means to fiftieths adds."""
    tied, rounding, error = [0.02] * 3, 0.02**2 / 6, 0.02 / math.sqrt(18)
    interval = metrics.mean_interval(tied, rounding=rounding)
    assert interval.high - interval.mean == pytest.approx(4.302653 * error, rel=1e-6)
    t = 0.02 / error
    assert metrics.mean_p_value(tied, rounding=rounding) == pytest.approx(1 - t / math.sqrt(2 + t**2))
    assert metrics.detectable(tied, rounding=rounding) > 0.02 > metrics.detectable(tied) == 0
    means = np.random.default_rng(0).random(10_000)
    assert np.var((means * 50).round() / 50 - means) == pytest.approx(0.02**2 / 12, rel=0.05)


@pytest.mark.parametrize(("successes", "trials", "low", "high"), [
    (0, 30, 0.0, 1 - 0.025 ** (1 / 30)), (30, 30, 0.025 ** (1 / 30), 1.0),
    (1, 30, 0.000843571, 0.172169456),  # scipy.stats.binomtest(1, 30).proportion_ci()
    (50, 1319, 0.028264141, 0.049673183),
])
def test_proportions_and_shares_of_whole_problems_have_clopper_and_pearsons_interval(successes, trials, low, high):
    found = metrics.proportion_interval(successes, trials)
    assert found == metrics.Interval(successes / trials, pytest.approx(low, rel=1e-6), pytest.approx(high, rel=1e-6))
    right = np.repeat([4.0, 0.0], [successes, trials - successes + 1])
    counts = np.repeat([4.0, 0.0], [trials, 1])  # the last one was not judged
    assert metrics.share_interval(right, counts, resamples=10, seed=0) == found


def test_the_paired_interval_finds_what_thirty_problems_show():
    rng = np.random.default_rng(0)
    chances, ones = rng.random(30) * 0.7, np.ones(30)
    better, worse = rng.binomial(30, chances + 0.2) / 30, rng.binomial(30, chances) / 30
    found = metrics.paired_share_interval(better, ones, worse, ones, resamples=2000, seed=0)
    assert found.low > 0.1 and found.high < 0.3
    assert found.mean == pytest.approx((better - worse).mean())
