"""Simulated coverage of the intervals of shares, where the percentile bootstrap fails."""

import coverage_table
import pytest


@pytest.mark.parametrize(("measure", "rate", "bootstrap_covers"), [
    ("greedy", 1 / 30, 0.75), ("sampled", 1 / 30, 0.85), ("vote@10", 0.1, 0.93), ("pass@4", 0.9, 0.93),
])
def test_intervals_hold_the_truth_for_thirty_problems_where_the_bootstrap_does_not(measure, rate, bootstrap_covers):
    """600 sets: the coverage of an interval with .95 is above .93 with probability .98."""
    coverage = coverage_table.coverage
    assert coverage(measure, 30, rate, 600, seed=1)[0] >= 0.93
    assert coverage(measure, 30, rate, 600, seed=1, old=True)[0] < bootstrap_covers


def test_equal_policies_on_thirty_problems_are_told_apart_in_five_of_a_hundred_at_most():
    """A share of .05 of 600 is above .07 with probability .015. The bootstrap's is .083."""
    for measure, rate in (("greedy", 0.1), ("sampled", 0.1)):
        test, interval, _ = coverage_table.rejections(measure, 30, rate, 600, seed=3)
        assert test <= 0.07 and interval <= 0.07
