import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Problem, Rollout

PROBLEMS = [Problem("p-1", "5 + 6", "5 + 6 = 11\n#### 11", "11", "p.jsonl:1"),
            Problem("p-2", "500 + 500", "#### 1000", "1000", "p.jsonl:2")]


def rollout(text: str, *, problem_id: str = "p-1", finished: bool = True, sample_index: int = 0) -> Rollout:
    return Rollout(problem_id, sample_index, (1,), (2,), (-0.5,), text, finished, policy_version=0, seed=0)


@pytest.mark.parametrize(("text", "finished", "reward", "answer", "well_formed", "reason"), [
    ("5 + 6 = 11\n#### 11", True, 1.0, "11", True, "correct"),
    ("#### 11.00\n", True, 1.0, "11", True, "correct"),
    ("#### 12\nno:\n#### 11", True, 1.0, "11", False, "correct"),
    ("5 + 6 = 12\n#### 12", True, 0.0, "12", True, "final answer 12, expected 11"),
    ("#### 11\n#### 12", True, 0.0, "12", False, "final answer 12, expected 11"),
    ("It is 11.", True, 0.0, None, False, "no final answer"),
    ("", True, 0.0, None, False, "no final answer"),
    ("5 + 6 = 11\n#### 11", False, 0.0, None, False, "did not finish"),
    ("5 + 6 = ", False, 0.0, None, False, "did not finish"),
])
def test_reward_answer_and_reason_of_a_response(text, finished, reward, answer, well_formed, reason):
    [scored] = ExactAnswerScorer().score([rollout(text, finished=finished)], PROBLEMS)
    assert (scored.reward, scored.answer, scored.well_formed, scored.reason) == (reward, answer, well_formed, reason)


def test_scores_keep_the_order_and_each_rollout_meets_its_own_problem():
    rollouts = [rollout("#### 1,000", problem_id="p-2"), rollout("#### 1,000"), rollout("#### 11", sample_index=3)]
    scored = ExactAnswerScorer().score(rollouts, PROBLEMS)
    assert [one.rollout for one in scored] == rollouts
    assert [one.reward for one in scored] == [1.0, 0.0, 1.0]


def test_rollout_of_an_unknown_problem_is_an_error():
    with pytest.raises(ValueError, match="1 problems that were not given, the first 'p-9'"):
        ExactAnswerScorer().score([rollout("#### 1", problem_id="p-9")], PROBLEMS)


@given(st.lists(st.sampled_from(["#### 11", "#### 12", "#### x", "5 + 6 = 11", ""])).map("\n".join), st.booleans())
def test_reward_is_one_exactly_where_the_answer_is_the_problems(text, finished):
    one = rollout(text, finished=finished)
    [scored] = ExactAnswerScorer().score([one], PROBLEMS)
    assert scored.reward == (1.0 if scored.answer == "11" else 0.0)
    assert (scored.reason == "correct") == (scored.reward == 1.0)
    [unfinished] = ExactAnswerScorer().score([dataclasses.replace(one, finished=False)], PROBLEMS)
    assert unfinished.reward == 0.0
