import sys
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import expected_vote_score, majority_at_k, pass_at_k, vote_success

few = settings(max_examples=40, deadline=None, derandomize=True)
votes = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7)


@few
@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, data):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations(range(n), k))
    hits = sum(min(subset) < correct for subset in subsets)
    assert pass_at_k(n, correct, k) == float(Fraction(hits, len(subsets)))


def test_pass_at_k_of_thousands_of_samples_is_right_to_the_last_digit():
    assert pass_at_k(3000, 1, 1500) == 0.5
    assert pass_at_k(10_000, 2, 5_000) == float(1 - Fraction(5_000 * 4_999, 10_000 * 9_999))
    assert pass_at_k(10_000, 3, 1) == 0.0003


@pytest.mark.parametrize(("n", "correct", "k"), [(10, 11, 1), (10, -1, 1), (10, 5, 11), (10, 5, 0), (0, 0, 1)])
def test_impossible_counts_are_errors(n, correct, k):
    with pytest.raises(ValueError, match="num_correct is|k is"):
        pass_at_k(n, correct, k)


@few
@given(answers=votes, data=st.data())
def test_majority_at_k_is_the_mean_score_of_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    scores = [Fraction(expected_vote_score(subset, "a")).limit_denominator(9) for subset in combinations(answers, k)]
    assert majority_at_k(answers, "a", k) == float(sum(scores) / len(scores))


def test_beyond_the_exact_form_an_estimate_converges_to_it_and_its_seed_fixes_it(monkeypatch):
    answers = ["a"] * 4 + ["b"] * 3 + ["c"] * 2 + [None]
    exact = majority_at_k(answers, "a", 5)
    monkeypatch.setattr(sys.modules[majority_at_k.__module__], "EXACT_WORK", 0)
    assert majority_at_k(answers, "a", 5, draws=200_000) == pytest.approx(exact, abs=0.005)
    assert majority_at_k(answers, "a", 5, seed=3) == majority_at_k(answers, "a", 5, seed=3)
    assert majority_at_k(answers, "a", 5, seed=3) != majority_at_k(answers, "a", 5, seed=4)
    assert majority_at_k(answers, "a", 10) == 1.0
    assert majority_at_k(["a"] + 9 * [None], "a", 5) == pytest.approx(0.5, abs=0.045)  # no vote is no win


@given(answers=votes)
def test_where_answers_decide_a_votes_success_is_that_it_gives_a_right_answer(answers):
    score = expected_vote_score(answers, "a") + expected_vote_score(answers, "b")
    assert vote_success(answers, [answer in ("a", "b") for answer in answers]) == pytest.approx(score)


def test_where_all_state_the_same_a_vote_is_right_as_often_as_they_are_and_no_verdict_elects():
    assert [vote_success(["0"] * 10, [True] * k + [False] * (10 - k)) for k in (4, 5, 6)] == [0.4, 0.5, 0.6]
    assert vote_success(["0", "0", "0", "1", None], [True, False, False, True, True]) == pytest.approx(1 / 3)
    assert vote_success(["0", "1", None], [True, False, True]) == 0.5
    assert vote_success([None, None], [True, True]) == 0.0
