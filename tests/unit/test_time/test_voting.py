import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.test_time import expected_vote_score, majority_vote, vote_counts, weighted_vote

few = settings(max_examples=40, deadline=None, derandomize=True)
votes = st.lists(st.sampled_from(["a", "b", "c", None]), max_size=9)


@few
@given(answers=votes)
def test_the_vote_is_the_first_seen_of_the_most_frequent_answers(answers):
    given_answers = [answer for answer in answers if answer is not None]
    counts = Counter(given_answers)
    tied = [answer for answer in given_answers if counts[answer] == max(counts.values())]
    assert majority_vote(answers) == (tied[0] if tied else None)


@few
@given(answers=votes, random=st.randoms(use_true_random=False))
def test_order_changes_neither_the_expected_score_nor_a_vote_without_a_tie(answers, random):
    shuffled = random.sample(answers, len(answers))
    scores = [expected_vote_score(answers, reference) for reference in "abc"]
    assert [expected_vote_score(shuffled, reference) for reference in "abc"] == scores
    if 1.0 in scores:
        assert majority_vote(shuffled) == majority_vote(answers) == "abc"[scores.index(1.0)]


@few
@given(answers=votes, abstentions=st.lists(st.integers(0, 9), max_size=3))
def test_abstentions_are_ignored(answers, abstentions):
    padded = list(answers)
    for position in abstentions:
        padded.insert(position, None)
    assert majority_vote(padded) == majority_vote(answers)
    assert expected_vote_score(padded, "a") == expected_vote_score(answers, "a")


@few
@given(answers=votes)
def test_expected_scores_share_one_among_the_tied_answers(answers):
    scores = [expected_vote_score(answers, reference) for reference in "abc"]
    assert math.fsum(scores) == pytest.approx(float(any(answer is not None for answer in answers)))
    assert len({score for score in scores if score > 0}) <= 1
    if majority_vote(answers) is not None:
        assert scores["abc".index(majority_vote(answers))] > 0


def test_one_answer_wins_alone():
    assert majority_vote(["a"]) == weighted_vote(["a"], [0.3]) == "a"
    assert majority_vote([None, None]) is None and majority_vote([]) is None
    assert weighted_vote([None], [1.0]) is None


@few
@given(answers=votes, weight=st.floats(1e-3, 1e3))
def test_equal_weights_give_the_plain_vote(answers, weight):
    assert weighted_vote(answers, [weight] * len(answers)) == majority_vote(answers)


@few
@given(ballots=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=8))
def test_a_whole_weight_counts_as_that_many_answers(ballots):
    repeated = [answer for answer, weight in ballots for _ in range(weight)]
    winner = weighted_vote([answer for answer, _ in ballots], [weight for _, weight in ballots])
    counts = Counter(repeated)
    assert counts[winner] == max(counts.values(), default=0)


def test_tenths_that_add_up_to_the_same_tie_whatever_their_order():
    assert weighted_vote(["a", "b", "b", "b"], [0.6, 0.1, 0.2, 0.3]) == "a"
    assert weighted_vote(["a", "b", "b", "b"], [0.6, 0.3, 0.2, 0.1]) == "a"


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.1], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_do_not_fit_are_errors(weights):
    with pytest.raises(ValueError, match="weights"):
        weighted_vote(["a", "b"], weights)


def test_a_reference_of_none_is_an_error():
    with pytest.raises(ValueError, match="reference is None"):
        expected_vote_score(["a"], None)


@few
@given(answers=votes)
def test_counts_are_of_the_answers_given_in_order_of_appearance(answers):
    assert vote_counts(answers) == list(Counter(answer for answer in answers if answer is not None).items())


@few
@given(answers=st.lists(st.one_of(st.none(), st.integers(-6, 6)), max_size=9))
def test_votes_over_an_equivalence_are_votes_over_its_classes_named_by_their_first_member(answers):
    def equivalent(a, b):
        return a % 3 == b % 3

    names = {}
    for answer in answers:
        if answer is not None:
            names.setdefault(answer % 3, answer)
    named = [None if answer is None else names[answer % 3] for answer in answers]
    weights = [0.5 + (position % 3) for position in range(len(answers))]
    assert majority_vote(answers, equivalent=equivalent) == majority_vote(named)
    assert weighted_vote(answers, weights, equivalent=equivalent) == weighted_vote(named, weights)
    assert vote_counts(answers, equivalent=equivalent) == vote_counts(named)


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


@pytest.mark.parametrize("equivalent", [None, lambda a, b: a == b])
def test_without_a_vote_there_is_no_answer(equivalent):
    for answers in ([], [None, None]):
        assert majority_vote(answers, equivalent=equivalent) is None
        assert weighted_vote(answers, [1.0] * len(answers), equivalent=equivalent) is None
        assert vote_counts(answers, equivalent=equivalent) == []
