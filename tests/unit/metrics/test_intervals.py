import math
from statistics import NormalDist

import numpy as np
import pytest

from nemo_edo.metrics import (
    bootstrap_ratio,
    mean_interval,
    mean_p_value,
    paired_bootstrap,
)


def test_the_bootstrap_of_a_ratio_of_sums_agrees_with_the_delta_methods_closed_form():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 20, size=800)
    sums = rng.binomial(counts, 0.3)
    ratio = sums.sum() / counts.sum()
    half = NormalDist().inv_cdf(0.975) * (sums - ratio * counts).std() / counts.mean() / math.sqrt(800)
    interval = bootstrap_ratio(sums, counts, resamples=4000, seed=1)
    assert interval.mean == pytest.approx(ratio)
    assert interval.low == pytest.approx(ratio - half, abs=0.05 * half)
    assert interval.high == pytest.approx(ratio + half, abs=0.05 * half)


def test_pairing_removes_what_both_have_in_common():
    rng = np.random.default_rng(0)
    difficulty, ones = rng.normal(scale=10, size=200), np.ones(200)
    a, b = difficulty + rng.normal(size=200) + 0.5, difficulty + rng.normal(size=200)
    paired = paired_bootstrap(a, ones, b, ones, resamples=2000, seed=0)
    half = NormalDist().inv_cdf(0.975) * (a - b).std() / math.sqrt(200)
    assert paired.mean == pytest.approx((a - b).mean())
    assert paired.high - paired.low == pytest.approx(2 * half, rel=0.1)


def test_the_mean_over_three_seeds_has_its_t_interval_and_one_seed_has_none():
    half = 4.302653 / math.sqrt(3)  # standard deviation 1
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-5)
    interval = mean_interval([0.7])
    assert interval.mean == 0.7 and math.isnan(interval.low) and math.isnan(interval.high)


@pytest.mark.parametrize(("values", "p"), [
    ([1.0, 3.0], 2 / math.pi * math.atan(1 / 2)),  # t = 2 with one degree of freedom: Cauchy's distribution
    ([-1.0, 0.0, -2.0], 1 - math.sqrt(3 / 5)),  # t = -sqrt(3) with two: P(|T| <= t) = t / sqrt(2 + t^2)
    ([0.5, 0.5], 0.0), ([0.0, 0.0], 1.0), ([-1.0, 1.0], 1.0), ([2.0], math.nan),
])
def test_the_p_value_of_a_mean_is_students(values, p):
    assert mean_p_value(values) == pytest.approx(p, abs=1e-12, nan_ok=True)
