from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import expected_vote_score, majority_at_k, pass_at_k

few = settings(max_examples=40, deadline=None, derandomize=True)
votes = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7)


@st.composite
def counts(draw):
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@few
@given(case=counts())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(case):
    n, correct, k = case
    subsets = list(combinations(range(n), k))
    hits = sum(min(subset) < correct for subset in subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(float(Fraction(hits, len(subsets))), abs=1e-12)


@few
@given(n=st.integers(1, 2000), share=st.floats(0, 1))
def test_pass_at_k_never_falls_with_k_and_ends_at_any_correct(n, share):
    correct = round(share * n)
    values = [pass_at_k(n, correct, k) for k in sorted({1, 2, 3, n // 3 + 1, n // 2 + 1, n}) if k <= n]
    assert values == sorted(values)
    assert values[0] == pytest.approx(correct / n)
    assert values[-1] == float(correct > 0)


def test_pass_at_k_of_thousands_of_correct_samples_does_not_overflow():
    assert pass_at_k(3000, 3000, 1500) == 1.0
    assert pass_at_k(3000, 1, 1500) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "correct", "k"), [(10, 11, 1), (10, -1, 1), (10, 5, 11), (10, 5, 0), (0, 0, 1)])
def test_impossible_counts_are_errors(n, correct, k):
    with pytest.raises(ValueError, match="num_correct is|k is"):
        pass_at_k(n, correct, k)


@few
@given(answers=votes, data=st.data())
def test_majority_at_k_agrees_with_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    subsets = list(combinations(answers, k))
    exact = sum(expected_vote_score(subset, "a") for subset in subsets) / len(subsets)
    closed_form = k in (1, len(answers))
    # 0.5 / sqrt(2000) = 0.011 is the largest standard error, and 40 cases are looked at
    assert majority_at_k(answers, "a", k) == pytest.approx(exact, abs=1e-12 if closed_form else 0.045)


def test_majority_at_k_converges_to_the_exact_value_and_its_seed_fixes_it():
    answers = ["a"] * 4 + ["b"] * 3 + ["c"] * 2 + [None]
    subsets = list(combinations(answers, 5))
    exact = sum(expected_vote_score(subset, "a") for subset in subsets) / len(subsets)
    assert majority_at_k(answers, "a", 5, draws=200_000) == pytest.approx(exact, abs=0.005)
    assert majority_at_k(answers, "a", 5, seed=3) == majority_at_k(answers, "a", 5, seed=3)
    assert majority_at_k(answers, "a", 5, seed=3) != majority_at_k(answers, "a", 5, seed=4)


def test_majority_at_k_rises_to_the_vote_of_all_for_a_frequent_answer():
    answers = ["a"] * 6 + ["b"] * 4
    values = [majority_at_k(answers, "a", k, draws=20_000) for k in (1, 3, 5, 9, 10)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.6, 1.0)


@pytest.mark.parametrize("k", [0, 4])
def test_more_votes_than_answers_are_an_error(k):
    with pytest.raises(ValueError, match=f"k is {k}, expected 1 to the number of samples, 3"):
        majority_at_k(["a", "b", None], "a", k)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_reference_of_none_is_an_error(k):
    with pytest.raises(ValueError, match="reference is None"):
        majority_at_k(["a", "b", None], None, k)
