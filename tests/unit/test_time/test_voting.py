import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import best_of_n, expected_vote_score, majority_vote, vote_counts, weighted_vote

few = settings(max_examples=40, deadline=None, derandomize=True)


@few
@given(answers=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=9))
def test_the_vote_is_the_first_seen_of_the_most_frequent_answers_which_share_an_expected_score_of_one(answers):
    counts = Counter(answer for answer in answers if answer is not None)
    assert vote_counts(answers) == list(counts.items())
    assert majority_vote(answers) == max(counts, key=counts.get, default=None)
    leaders = [answer for answer, count in counts.items() if count == max(counts.values())]
    scores = [expected_vote_score(answers, reference) for reference in "abc"]
    assert scores == [1 / len(leaders) if reference in leaders else 0.0 for reference in "abc"]


@few
@given(ballots=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=8))
def test_a_whole_weight_counts_as_that_many_answers(ballots):
    winner = weighted_vote([answer for answer, _ in ballots], [weight for _, weight in ballots])
    counts = Counter(answer for answer, weight in ballots for _ in range(weight))
    assert counts[winner] == max(counts.values(), default=0)


def test_tenths_that_add_up_to_the_same_tie_whatever_their_order():
    assert weighted_vote(["a", "b", "b", "b"], [0.6, 0.1, 0.2, 0.3]) == "a"
    assert weighted_vote(["a", "b", "b", "b"], [0.6, 0.3, 0.2, 0.1]) == "a"


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.1], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_do_not_fit_are_errors(weights):
    with pytest.raises(ValueError, match="weights"):
        weighted_vote(["a", "b"], weights)


def test_equivalence_is_asked_of_the_representative_and_takes_answers_without_a_hash():
    asked = []

    def equivalent(representative, answer):
        asked.append((representative[0], answer[0]))
        return abs(representative[0] - answer[0]) <= 1

    answers = [[1], None, [2], [3], [4]]
    # 2 joins 1; 3 is within reach of 2 but not of the representative 1; 4 joins 3: the first of two equal classes wins.
    assert vote_counts(answers, equivalent=equivalent) == [([1], 2), ([3], 2)]
    assert asked == [(1, 2), (1, 3), (1, 4), (3, 4)]
    assert majority_vote(answers, equivalent=equivalent) == [1]
    assert majority_vote(answers[::-1], equivalent=equivalent) == [4]
    assert weighted_vote(answers, [1, 9, 1, 1, 1.5], equivalent=equivalent) == [3]


@few
@given(scores=st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_the_best_is_the_first_of_the_highest_scores_whatever_increasing_transform_they_have(scores):
    for transform in (float, math.exp, lambda score: 3 * score - 7):
        assert best_of_n(range(len(scores)), [transform(score) for score in scores]) == np.argmax(scores)


def test_each_aggregation_chooses_by_its_own_statistic():
    steps = {"last": [0.3, 0.3, 0.95], "min": [0.6, 0.6, 0.6], "product": [0.5], "mean": [0.9, 0.5, 0.9]}
    chosen = {how: best_of_n(list(steps), list(steps.values()), aggregation=how) for how in steps}
    assert chosen == {"last": "last", "min": "min", "product": "product", "mean": "mean"}


@pytest.mark.parametrize(("candidates", "scores", "aggregation", "message"), [
    ("", [], None, "candidates is empty"), ("ab", [1.0], None, "1 scores for 2 candidates"),
    ("ab", torch.ones(2, 2), None, r"scores\[0\].*a number"), ("ab", [[1.0], 2.0], "min", r"scores\[1\].*steps"),
    ("a", [[1.5]], "product", r"\[0, 1\]"), ("a", [[-0.5, -0.5]], "product", r"\[0, 1\]"),
])
def test_scores_that_do_not_fit_are_errors(candidates, scores, aggregation, message):
    with pytest.raises(ValueError, match=message):
        best_of_n(candidates, scores, aggregation=aggregation)
