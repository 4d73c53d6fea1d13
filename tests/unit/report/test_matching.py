"""Entropy and Distinct-4 at matched accuracy."""

import math

import matching_simulation as simulation
import numpy as np
import pytest

from nemo_edo.report.matching import match_accuracy


def points(*pairs) -> np.ndarray:
    """[C, 3] of (accuracy, entropy): Distinct-4 is twice the entropy."""
    return np.array([(accuracy, entropy, 2 * entropy) for accuracy, entropy in pairs]).reshape(-1, 3)


def test_matching_reads_the_middle_of_the_range_that_all_arms_reached_by_interpolation():
    slow, fast = points((0.2, 1.0), (0.6, 0.9)), points((0.2, 1.0), (0.7, 0.5), (1.0, 0.2))
    matched = match_accuracy({"fast": fast, "slow": slow})
    assert matched.accuracy == pytest.approx(0.2 + 0.55 * 0.4)
    assert matched.values["slow"] == pytest.approx([1 - 0.055, 2 * (1 - 0.055)])
    assert matched.values["fast"] == pytest.approx([0.78, 2 * 0.78])


def test_a_collection_that_falls_is_averaged_with_those_before_it_and_a_collapse_after_the_best_is_left_out():
    bumpy = points((0.2, 1.0), (0.5, 0.6), (0.3, 0.8), (0.6, 0.5), (0.0, 0.0))
    straight = points((0.2, 1.0), (0.4, 0.7), (0.6, 0.5))
    matched = match_accuracy({"bumpy": bumpy, "straight": straight})
    assert matched.values["bumpy"] == pytest.approx(matched.values["straight"])


def test_an_arm_that_never_left_the_start_has_a_reason_and_does_not_pull_the_level_down():
    curves = {"a": points((0.3, 1.0), (0.7, 0.5)), "b": points((0.3, 1.0), (0.6, 0.6))}
    matched = match_accuracy(curves | {"collapsed": points((0.3, 1.0), (0.31, 0.9), (0.0, 0.0))})
    assert matched.accuracy == pytest.approx(0.3 + 0.55 * 0.3)
    assert "never left the start" in matched.reasons["collapsed"]
    assert "collapsed" not in matched.values


def test_where_fewer_than_two_arms_learned_nothing_is_matched_and_each_has_a_reason():
    flat, learned = points((0.3, 1.0), (0.31, 1.0)), points((0.2, 1.0), (0.6, 0.5))
    for curves in ({"a": flat, "b": flat}, {"a": learned, "b": points()}):
        matched = match_accuracy(curves)
        assert (matched.accuracy, set(matched.reasons)) == (None, {"a", "b"})
    assert "no collection" in matched.reasons["b"]


def test_collections_without_a_measure_give_nan_not_zero():
    bare = points((0.2, math.nan), (math.nan, math.nan), (0.6, math.nan))
    matched = match_accuracy({"a": bare, "b": points((0.2, 1.0), (0.5, 0.5))})
    assert np.isnan(matched.values["a"]).all()


@pytest.mark.parametrize("frontier", ["steep", "flat"])
def test_a_slower_arm_on_the_same_frontier_is_found_different_in_five_of_a_hundred_studies(frontier: str):
    """With running maxima it was .35. Of 300 studies, a share of .05 is above .085 with probability .005."""
    assert simulation.shown(np.random.default_rng(1), frontier, 10, 300) <= 0.085
