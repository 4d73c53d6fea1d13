"""Intervals of shares against closed forms; their simulated coverage is in unit/test_coverage_table.py."""

import numpy as np
import pytest

from nemo_edo.metrics import (
    Interval,
    paired_share_interval,
    proportion_interval,
    share_interval,
)
from nemo_edo.metrics.shares import mean_of_shares


@pytest.mark.parametrize(("successes", "trials", "low", "high"), [
    (0, 30, 0.0, 1 - 0.025 ** (1 / 30)),
    (30, 30, 0.025 ** (1 / 30), 1.0),
    (1, 30, 0.000843571, 0.172169456),  # scipy.stats.binomtest(1, 30).proportion_ci()
    (50, 1319, 0.028264141, 0.049673183),
])  # fmt: skip
def test_a_proportion_has_the_interval_of_clopper_and_pearson(successes: int, trials: int, low: float, high: float):
    found = proportion_interval(successes, trials)
    assert found == Interval(successes / trials, pytest.approx(low, rel=1e-6), pytest.approx(high, rel=1e-6))


def test_where_problems_are_right_or_wrong_as_a_whole_the_share_is_a_proportion():
    right, counts = np.array([4.0, 0, 0, 4, 0, 0]), np.array([4.0, 4, 4, 4, 4, 0])  # the last one was not judged
    assert share_interval(right, counts, resamples=10, seed=0) == proportion_interval(2, 5)


def test_the_paired_interval_finds_what_thirty_problems_show():
    rng = np.random.default_rng(0)
    chances, ones = rng.random(30) * 0.7, np.ones(30)
    better, worse = rng.binomial(30, chances + 0.2) / 30, rng.binomial(30, chances) / 30
    found = paired_share_interval(better, ones, worse, ones, resamples=2000, seed=0)
    assert found.low > 0.1 and found.high < 0.3
    assert found.mean == pytest.approx((better - worse).mean())


def test_the_mean_over_benchmarks_weighs_them_equally():
    rng = np.random.default_rng(3)
    pairs = [(rng.random(30), np.ones(30)), (rng.random(500) / 2, np.ones(500))]
    found = mean_of_shares(pairs, resamples=500, seed=1)
    assert found.mean == pytest.approx(np.mean([sums.mean() for sums, _ in pairs]))
    widths = [one.high - one.low for one in (share_interval(*pair, resamples=500, seed=1) for pair in pairs)]
    assert widths[0] / 2 < found.high - found.low < sum(widths) / 2 * 1.05
