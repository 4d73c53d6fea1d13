"""Entropy and Distinct-4 at matched accuracy."""

import math

import pytest

from nemo_edo.report.matching import CurvePoint, match_accuracy


def points(*pairs):
    return [CurvePoint(accuracy, {"entropy": entropy, "distinct_4": 2 * entropy}) for accuracy, entropy in pairs]


def test_matching_interpolates_at_the_lowest_of_the_arms_best_accuracies_without_collections_below_the_best_so_far():
    dip = points((0.2, 1.0), (0.4, 0.8), (0.3, 99.0), (0.8, 0.4))
    matched = match_accuracy({"dip": dip, "slow": points((0.2, 1.0), (0.6, 0.9))})
    assert matched.accuracy == 0.6
    assert matched.values["entropy"] == {"dip": pytest.approx(0.6), "slow": pytest.approx(0.9)}
    assert matched.values["distinct_4"]["dip"] == pytest.approx(1.2)


def test_an_arm_that_never_left_the_start_has_a_reason_and_does_not_pull_the_level_down():
    curves = {"a": points((0.3, 1.0), (0.7, 0.5)), "b": points((0.3, 1.0), (0.6, 0.6))}
    matched = match_accuracy(curves | {"collapsed": points((0.3, 1.0), (0.31, 0.9), (0.0, 0.0))})
    assert matched.accuracy == 0.6
    assert "never left the start" in matched.reasons["collapsed"]
    assert "collapsed" not in matched.values["entropy"]


def test_where_fewer_than_two_arms_learned_nothing_is_matched_and_each_has_a_reason():
    flat, learned = points((0.3, 1.0), (0.31, 1.0)), points((0.2, 1.0), (0.6, 0.5))
    for curves in ({"a": flat, "b": flat}, {"a": learned, "b": []}):
        matched = match_accuracy(curves)
        assert (matched.accuracy, set(matched.reasons)) == (None, {"a", "b"})
    assert "no collection" in matched.reasons["b"]


def test_collections_without_a_measure_give_nan_not_zero():
    bare = [CurvePoint(0.2, {}), CurvePoint(math.nan, {}), CurvePoint(0.6, {})]
    matched = match_accuracy({"a": bare, "b": points((0.2, 1.0), (0.5, 0.5))})
    assert math.isnan(matched.values["entropy"]["a"])
