import pytest

from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Problem, Rollout

PROBLEMS = [Problem("p-1", "5 + 6", "5 + 6 = 11\n#### 11", "11", "p.jsonl:1"),
            Problem("p-2", "500 + 500", "#### 1000", "1000", "p.jsonl:2")]


def rollout(text: str, *, problem_id: str = "p-1", finished: bool = True, sample_index: int = 0) -> Rollout:
    return Rollout(problem_id, sample_index, (1,), (2,), (-0.5,), text, finished, policy_version=0, seed=0)


@pytest.mark.parametrize(("text", "reward", "answer", "well_formed", "reason"), [
    ("5 + 6 = 11\n#### 11", 1.0, "11", True, "correct"),
    ("#### 12\nno:\n#### 11", 1.0, "11", False, "correct"),
    ("5 + 6 = 12\n#### 12", 0.0, "12", True, "final answer 12, expected 11"),
    ("#### 11 apples", 1.0, "11", True, "correct"),
    ("It is 11.", 0.0, None, False, "no final answer"),
])
def test_reward_answer_and_reason_of_a_response(text, reward, answer, well_formed, reason):
    [scored, cut] = ExactAnswerScorer().score([rollout(text), rollout(text, finished=False)], PROBLEMS)
    assert (scored.reward, scored.answer, scored.well_formed, scored.reason) == (reward, answer, well_formed, reason)
    assert (cut.reward, cut.answer, cut.well_formed, cut.reason) == (0.0, None, False, "did not finish")


def test_scores_keep_the_order_and_each_rollout_meets_its_own_problem():
    rollouts = [rollout("#### 1,000", problem_id="p-2"), rollout("#### 1,000"), rollout("#### 11", sample_index=3)]
    scored = ExactAnswerScorer().score(rollouts, PROBLEMS)
    assert [one.rollout for one in scored] == rollouts
    assert [one.reward for one in scored] == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="p-9"):
        ExactAnswerScorer().score([rollout("#### 1", problem_id="p-9")], PROBLEMS)
