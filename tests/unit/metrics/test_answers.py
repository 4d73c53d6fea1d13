import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from nemo_edo.metrics import answer_entropy, distinct_answers

few = settings(max_examples=20, deadline=None, derandomize=True)
votes = st.lists(st.sampled_from(["1", "2", "3", 4, None]), max_size=12)


@few
@given(answers=votes)
def test_answer_entropy_agrees_with_scipy_and_lies_in_zero_to_the_log_of_the_distinct_answers(answers):
    given_answers = [answer for answer in answers if answer is not None]
    shares = [given_answers.count(answer) for answer in set(given_answers)]
    value = answer_entropy(answers)
    assert value == pytest.approx(entropy(shares) if shares else 0.0, abs=1e-14)
    assert 0 <= value <= math.log(max(distinct_answers(answers), 1)) + 1e-14


@few
@given(answers=votes, data=st.data())
def test_order_and_abstentions_do_not_matter(answers, data):
    other = data.draw(st.permutations([*answers, None]))
    assert answer_entropy(other) == pytest.approx(answer_entropy(answers), abs=1e-14)
    assert distinct_answers(other) == distinct_answers(answers)


def test_abstentions_are_no_answers():
    assert distinct_answers(["1", None, "2", "1", None]) == 2
    assert distinct_answers([None, None]) == distinct_answers([]) == 0


@pytest.mark.parametrize("answers", [[], [None], ["1"], ["1", "1", None]])
@pytest.mark.parametrize("normalized", [False, True])
def test_without_disagreement_the_entropy_is_exactly_zero(answers, normalized):
    assert answer_entropy(answers, normalized=normalized) == 0.0


@pytest.mark.parametrize("different", [2, 3, 7, 10, 49])
def test_answers_that_all_differ_have_the_highest_entropy(different):
    assert answer_entropy(range(different)) == pytest.approx(math.log(different))
    assert answer_entropy([*range(different), None], normalized=True) == pytest.approx(1.0, abs=1e-15)


def test_the_normalized_entropy_is_a_share_of_what_that_many_answers_could_have():
    assert answer_entropy(["1", "1", "2", "2"], normalized=True) == pytest.approx(math.log(2) / math.log(4))
