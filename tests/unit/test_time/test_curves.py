"""Curves over k: each against the mean over all subsets of k, written out, and against the library's own rules."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import majority_at_k
from nemo_edo.test_time import expected_vote_score
from nemo_edo.test_time.curves import best_of_curve, sample_circles, vote_curve

WEIGHTED = st.lists(
    st.tuples(st.sampled_from(["right", "a", "b", "c", None]), st.sampled_from([0.0, 0.1, 0.2, 0.7])),
    min_size=1, max_size=5,
)


def subsets(n: int, k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(n), k))


def all_circles(n: int) -> np.ndarray:
    """Every order, so that the estimate is the expectation itself."""
    return np.array(list(itertools.permutations(range(n))))


def vote_of(answers, weights, places) -> float:
    """The expected score of a weighted vote, ties broken at random, from the definition."""
    totals: dict[str, float] = {}
    for place in places:
        if answers[place] is not None:
            totals[answers[place]] = totals.get(answers[place], 0.0) + weights[place]
    leaders = [answer for answer, total in totals.items() if total >= max(totals.values()) - 1e-12]
    return float("right" in leaders) / max(len(leaders), 1)


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


@settings(max_examples=60, deadline=None)
@given(WEIGHTED)
def test_votes_over_all_circles_are_the_mean_over_all_subsets(pairs):
    answers, weights = [a for a, _ in pairs], [w for _, w in pairs]
    n, right = len(pairs), [answer == "right" for answer in answers]
    plain, weighted = (
        [np.mean([score(places) for places in subsets(n, k)]) for k in range(1, n + 1)]
        for score in (lambda places: expected_vote_score([answers[p] for p in places], "right"),
                      lambda places: vote_of(answers, weights, places))
    )
    np.testing.assert_allclose(vote_curve(answers, right, all_circles(n)), plain, atol=1e-12)
    np.testing.assert_allclose(vote_curve(answers, right, all_circles(n), weights), weighted, atol=1e-9)


def test_the_estimate_of_64_responses_is_within_its_error_of_the_exact_vote():
    rng = random.Random(3)
    answers = rng.choices(["right", "a", "b", "c", None, *map(str, range(20))], [9, 8, 4, 2, 3, *[1] * 20], k=64)
    circles = sample_circles(64, 4000, np.random.default_rng(0))
    curve = vote_curve(answers, [answer == "right" for answer in answers], circles)
    exact = [majority_at_k(answers, "right", k) for k in range(1, 65)]
    np.testing.assert_allclose(curve, exact, atol=0.02)
    for k in (1, 63, 64):  # every response, and every one left out, is in as many windows
        assert curve[k - 1] == pytest.approx(exact[k - 1], abs=1e-12)
