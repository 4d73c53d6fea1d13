"""Entropy and Distinct-4 at matched accuracy."""

import math

import matching_simulation as simulation
import numpy as np
import pytest

from nemo_edo.report.matching import match_accuracy


def points(*pairs) -> np.ndarray:
    """[C, 3] of (accuracy, entropy): Distinct-4 is twice the entropy."""
    return np.array([(accuracy, entropy, 2 * entropy) for accuracy, entropy in pairs]).reshape(-1, 3)


def line(*accuracies: float, bend: float = 0.0, shift: float = 0.0) -> np.ndarray:
    """Points of a straight frontier, or of one that bends."""
    return points(*((a, 1 + shift - a + bend * a**2) for a in accuracies))


def test_arms_are_compared_in_the_middle_of_the_range_that_all_reached_and_a_shift_is_found_whatever_the_speeds():
    slow, fast = line(*np.linspace(0.2, 0.6, 9)), line(0.2, 0.35, 0.49, 0.7, 0.9, shift=0.1)
    matched = match_accuracy({"fast": fast, "slow": slow}, "slow")
    assert matched.accuracy == pytest.approx(0.2 + 0.55 * 0.4)
    assert matched.values["slow"] == pytest.approx([1 - 0.42, 2 * (1 - 0.42)])
    assert matched.values["fast"] == pytest.approx([1.1 - 0.42, 2 * (1.1 - 0.42)])


def test_the_chords_of_a_quadratic_frontier_cancel():
    """Read at common levels, the arm with the longer chords would be 0.02 above the other."""
    dense, sparse = line(*np.linspace(0.1, 0.9, 401), bend=2), line(*np.linspace(0.1, 0.9, 5), bend=2)
    values = match_accuracy({"dense": dense, "sparse": sparse}).values
    assert values["sparse"] == pytest.approx(values["dense"], abs=0.001)


def test_a_collection_that_falls_is_averaged_with_those_before_it_and_a_collapse_after_the_best_is_left_out():
    bumpy = points((0.2, 1.0), (0.5, 0.6), (0.3, 0.8), (0.6, 0.5), (0.0, 0.0))
    straight = points((0.2, 1.0), (0.4, 0.7), (0.6, 0.5))
    matched = match_accuracy({"bumpy": bumpy, "straight": straight})
    assert matched.values["bumpy"] == pytest.approx(matched.values["straight"])


def test_an_arm_that_never_left_the_start_has_a_reason_and_does_not_pull_the_level_down():
    curves = {"a": line(0.3, 0.45, 0.7), "b": line(0.3, 0.5, 0.6)}
    matched = match_accuracy(curves | {"collapsed": points((0.3, 1.0), (0.31, 0.9), (0.0, 0.0))})
    assert matched.accuracy == pytest.approx(0.3 + 0.55 * 0.3)
    assert "never left the start" in matched.reasons["collapsed"]
    assert "collapsed" not in matched.values


def test_arms_without_a_collection_in_the_range_cannot_be_compared():
    matched = match_accuracy({"a": line(0.2, 0.9), "b": line(0.2, 0.8)})
    assert matched.accuracy is None and matched.values == {} and "cannot be compared" in matched.reasons["b"]


def test_where_fewer_than_two_arms_learned_nothing_is_matched_and_each_has_a_reason():
    flat, learned = points((0.3, 1.0), (0.31, 1.0)), points((0.2, 1.0), (0.6, 0.5))
    for curves in ({"a": flat, "b": flat}, {"a": learned, "b": points()}):
        matched = match_accuracy(curves)
        assert (matched.accuracy, set(matched.reasons)) == (None, {"a", "b"})
    assert "no collection" in matched.reasons["b"]


def test_collections_without_a_measure_give_nan_not_zero():
    bare = points((0.2, math.nan), (math.nan, math.nan), (0.35, math.nan), (0.6, math.nan))
    matched = match_accuracy({"a": bare, "b": line(0.2, 0.4, 0.5)})
    assert np.isnan(matched.values["a"]).all()


@pytest.mark.parametrize("frontier", ["flat", "quadratic", "hinge", "late hinge", "S-shaped"])
def test_a_slower_arm_on_the_same_frontier_is_found_different_in_few_of_a_hundred_studies(frontier: str):
    """By common levels it was .5 for a hinge. Of 200 studies, a share of .06 is above .105 with probability .005."""
    assert simulation.shown(np.random.default_rng(1), frontier, 10, 200, speeds=(3.0, 20.0)) <= 0.105
