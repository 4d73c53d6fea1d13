"""Curves over k: each against the mean over all subsets of k, written out, and against the library's own rules."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import majority_at_k, pass_at_k
from nemo_edo.test_time import expected_vote_score, weighted_vote
from nemo_edo.test_time.curves import Circles, best_of_curve, pass_curve, vote_curve

ANSWERS = st.lists(st.sampled_from(["right", "a", "b", "c", None]), min_size=1, max_size=7)


def subsets(n: int, k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(n), k))


def circles_of(n: int, size: int = 4000, seed: int = 0) -> Circles:
    return Circles.drawn(n, size, np.random.default_rng(seed))


def all_circles(n: int) -> Circles:
    """Every order, so that the estimate is the expectation itself."""
    return Circles(np.array(list(itertools.permutations(range(n)))))


def vote_of(answers, weights, places) -> float:
    """The expected score of a weighted vote, ties broken at random, from the definition."""
    totals: dict[str, float] = {}
    for place in places:
        if answers[place] is not None:
            totals[answers[place]] = totals.get(answers[place], 0.0) + weights[place]
    leaders = [answer for answer, total in totals.items() if total >= max(totals.values()) - 1e-12]
    return float("right" in leaders) / max(len(leaders), 1)


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 2), (30, 7), (64, 1)])
def test_pass_curve_is_the_unbiased_estimate_at_every_k(n: int, correct: int):
    assert pass_curve(n, correct).tolist() == [pass_at_k(n, correct, k) for k in range(1, n + 1)]


def test_pass_curve_is_the_callers_own():
    pass_curve(9, 4)[:] = 7
    assert pass_curve(9, 4)[-1] == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=7))
def test_best_of_k_is_the_mean_over_all_subsets_with_ties_averaged(pairs):
    scores, rewards = [float(s) for s, _ in pairs], [float(r) for _, r in pairs]

    def best(places) -> float:
        highest = max(scores[p] for p in places)
        tied = [rewards[p] for p in places if scores[p] == highest]
        return sum(tied) / len(tied)

    expected = [np.mean([best(places) for places in subsets(len(pairs), k)]) for k in range(1, len(pairs) + 1)]
    np.testing.assert_allclose(best_of_curve(scores, rewards), expected, atol=1e-12)


def test_best_of_k_by_the_rewards_themselves_is_pass_at_k():
    rewards = [1.0] * 3 + [0.0] * 9
    np.testing.assert_allclose(best_of_curve(rewards, rewards), pass_curve(12, 3), atol=1e-12)


def test_best_of_k_by_one_score_for_all_is_the_accuracy():
    np.testing.assert_allclose(best_of_curve([2.0] * 8, [1, 0, 0, 0, 1, 0, 0, 0]), [0.25] * 8, atol=1e-12)


def test_best_of_k_takes_the_highest_score_and_not_the_lowest():
    curve = best_of_curve([0.9, 0.1, 0.2], [1.0, 0.0, 0.0])
    np.testing.assert_allclose(curve, [1 / 3, 2 / 3, 1.0])


@settings(max_examples=40, deadline=None)
@given(ANSWERS.filter(lambda answers: len(answers) <= 5))
def test_votes_over_all_circles_are_the_mean_over_all_subsets(answers):
    n, right = len(answers), [answer == "right" for answer in answers]
    expected = [
        np.mean([expected_vote_score([answers[p] for p in places], "right") for places in subsets(n, k)])
        for k in range(1, n + 1)
    ]
    np.testing.assert_allclose(vote_curve(answers, right, all_circles(n)), expected, atol=1e-12)


WEIGHTED = st.tuples(st.sampled_from(["right", "a", "b", None]), st.sampled_from([0.0, 0.1, 0.2, 0.7]))


@settings(max_examples=40, deadline=None)
@given(st.lists(WEIGHTED, min_size=1, max_size=5))
def test_weighted_votes_over_all_circles_are_the_mean_over_all_subsets(pairs):
    answers, weights = [a for a, _ in pairs], [w for _, w in pairs]
    n, right = len(pairs), [answer == "right" for answer in answers]
    expected = [np.mean([vote_of(answers, weights, places) for places in subsets(n, k)]) for k in range(1, n + 1)]
    np.testing.assert_allclose(vote_curve(answers, right, all_circles(n), weights), expected, atol=1e-9)


def test_the_estimate_of_64_responses_is_within_its_error_of_the_exact_vote():
    rng = random.Random(3)
    answers = rng.choices(["right", "a", "b", "c", None, *map(str, range(20))], [9, 8, 4, 2, 3, *[1] * 20], k=64)
    curve = vote_curve(answers, [answer == "right" for answer in answers], circles_of(64))
    exact = [majority_at_k(answers, "right", k) for k in range(1, 65)]
    np.testing.assert_allclose(curve, exact, atol=0.02)
    for k in (1, 63, 64):  # every response, and every one left out, is in as many windows
        assert curve[k - 1] == pytest.approx(exact[k - 1], abs=1e-12)


def test_the_estimate_has_no_bias_at_two_circles():
    answers = ["right", "right", "a", "a", "a", "b", None, "c"]
    right, exact = [answer == "right" for answer in answers], majority_at_k(answers, "right", 4)
    drawn = [vote_curve(answers, right, circles_of(8, 16, seed))[3] for seed in range(600)]
    assert np.mean(drawn) == pytest.approx(exact, abs=4 * np.std(drawn) / math.sqrt(600))
    assert np.std(drawn) > 0


def test_equal_weights_make_the_majority_and_scale_does_not_matter():
    answers = ["right", "a", "a", "b", None, "right", "right", "c"]
    right, circles = [answer == "right" for answer in answers], circles_of(8, 64)
    plain = vote_curve(answers, right, circles)
    np.testing.assert_allclose(vote_curve(answers, right, circles, [0.3] * 8), plain, atol=1e-12)
    weights = [0.9, 0.1, 0.4, 0.3, 1.0, 0.2, 0.6, 0.5]
    scaled = vote_curve(answers, right, circles, [1e4 * w for w in weights])
    np.testing.assert_allclose(vote_curve(answers, right, circles, weights), scaled, atol=1e-12)


def test_the_whole_weighted_vote_is_the_librarys():
    answers, weights = ["right", "a", "a", "b"], [0.8, 0.3, 0.4, 0.1]
    assert weighted_vote(answers, weights) == "right"
    assert vote_curve(answers, [True, False, False, False], circles_of(4), weights)[-1] == 1.0
    assert vote_curve(answers, [True, False, False, False], circles_of(4))[-1] == 0.0


def test_circles_hold_every_response_once_and_are_enough():
    orders = Circles.drawn(7, 15, np.random.default_rng(0)).orders
    assert orders.shape == (3, 7) and (np.sort(orders, axis=1) == np.arange(7)).all()
    assert len({tuple(order) for order in orders}) == 3


def test_one_seed_gives_one_curve():
    answers, right = ["right", "a", "b", "a", "right"], [True, False, False, False, True]
    first, second = (vote_curve(answers, right, circles_of(5, 10)) for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: best_of_curve([1.0], [1.0, 0.0]), "one for each response"),
    (lambda: best_of_curve([], []), "one for each response"),
    (lambda: best_of_curve([math.nan], [1.0]), "finite"),
    (lambda: vote_curve(["a"], [True], circles_of(2)), "1 answers and 1 marks for circles of 2"),
    (lambda: vote_curve(["a", "a"], [True, False], circles_of(2)), "'a' is right in one response and wrong in another"),
    (lambda: vote_curve(["a", "b"], [True, False], circles_of(2), [1.0, -0.1]), "at least 0"),
    (lambda: vote_curve(["a", "b"], [True, False], circles_of(2), [1.0]), "2 finite numbers"),
    (lambda: Circles.drawn(0, 4, np.random.default_rng(0)), "num_samples"),
    (lambda: Circles.drawn(3, 0, np.random.default_rng(0)), "subsets"),
])  # fmt: skip
def test_what_fits_no_curve_is_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
