import json
from pathlib import Path

import pytest

from nemo_edo.builtin_task.model import write_tokenizer
from nemo_edo.config.compose import compose_run
from nemo_edo.rewards.math_verifier import MathScorer
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.run import inputs
from nemo_edo.run.folder import RunFolder
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


pytestmark = pytest.mark.usefixtures("one_rank")


def load(folder: Path, train: list[tuple[str, str]], *overrides: str, boxed: bool = True) -> inputs.Data:
    """Of a run on these questions and answers, in MATH's format or GSM8K's."""
    for name, rows in (("train", train), ("test", [("2 + 2", "4")])):
        texts = [
            {"problem": q, "solution": f"\\boxed{{{a}}}"} if boxed else {"question": q, "answer": f"#### {a}"}
            for q, a in rows
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    files = [f"data.{name}={folder / name}.jsonl" for name in ("train", "test")]
    cfg = compose_run("quickstart", [*files, "sft.steps=0", "rewards.time_limit_s=60", "rewards.workers=1", *overrides])
    write_tokenizer(RunFolder(folder).base, cfg.data.arithmetic)
    return inputs.load_data(cfg, RunFolder(folder))


MATH = ("data.benchmark=math", "data.check_rows=false", "data.answer_format=boxed")


def test_latex_answers_are_scored_by_meaning_and_numbers_exactly(tmp_path):
    data = load(tmp_path, [("1 + 1", r"\frac{1}{2}")], *MATH)
    assert isinstance(data.scorer, MathScorer)
    [scored] = data.scorer.score(
        [Rollout("train-1", 0, (1,), (2,), (0.0,), r"\boxed{\sqrt{\frac14}}", True, 0, 0)], data.train
    )
    assert (scored.reward, scored.answer) == (1.0, "1/2")
    assert isinstance(load(tmp_path, [("1 + 1", "2")], *MATH, "rewards.verifier=exact").scorer, ExactAnswerScorer)
    assert isinstance(load(tmp_path, [("1 + 1", "2")], boxed=False).scorer, ExactAnswerScorer)


def test_gold_answer_that_cannot_be_parsed_is_an_error_with_file_and_line(tmp_path):
    rows = [("1 + 1", "2"), ("1 + 2", r"\frac{1}{}+")]
    with pytest.raises(ValueError, match=r"train\.jsonl:2: the answer cannot be parsed: \\frac\{1\}\{\}\+"):
        load(tmp_path, rows, *MATH)
    data = load(tmp_path, rows, *MATH, "data.on_bad_rows=skip")
    assert ([problem.id for problem in data.train], data.skipped_rows) == (["train-1"], 1)
