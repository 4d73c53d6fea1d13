"""reasoning-gym's tasks as problems with their own scores."""

import json
from dataclasses import replace

import pytest
from helpers.responses import scored

from nemo_edo.config import Columns
from nemo_edo.data.answers import answer_format
from nemo_edo.data.problems import made_problems
from nemo_edo.data.rows import plain_values
from nemo_edo.types import Problem

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")  # it needs a C compiler
from nemo_edo.data.reasoning_gym import make, score

SOURCE = "nemo_edo.data.reasoning_gym:make"


def score_of(problem: Problem, answer: str | None) -> float:
    return score(question=problem.question, final_answer=answer, metadata=problem.metadata, problem_id=problem.id)


@pytest.mark.parametrize("task", ["gsm_symbolic", "rearc", "mini_sudoku"])
def test_a_tasks_own_solution_scores_1_after_storage_and_another_answer_is_no_success(task: str):
    arguments = {"name": task, "train_problems": 6, "test_problems": 3}
    made = made_problems(SOURCE, arguments, Columns())
    extract = answer_format("hashes_text").extract
    problems = [*made["train"], *made["test"]]
    for problem in problems:
        stored = replace(problem, metadata=json.loads(json.dumps(plain_values(problem.metadata))))
        final = extract(problem.solution)
        assert final == problem.answer.strip()  # of any kind, and several lines
        assert score_of(stored, final) == 1
        wrong = score_of(stored, extract("#### nothing of the kind"))
        assert 0 <= wrong < 1 and not scored(reward=wrong).success
        assert score_of(stored, None) == 0
    assert len({problem.question for problem in problems}) == len({problem.id for problem in problems}) == 9
    assert made == made_problems(SOURCE, arguments, Columns())


def test_a_wrong_numbers_reward_is_seen_and_is_no_success():
    [problem] = make("gsm_symbolic", train_problems=0, test_problems=1)["test"]
    assert score_of(problem, "-1") == 0.01
    assert "so he works for 6 days/week" in problem.solution  # what a warm-up learns


@pytest.mark.parametrize("task", ["prime_factorization", "boxnet"])
def test_an_answer_that_a_task_cannot_read_is_wrong_and_ends_no_run(task: str):
    [problem] = make(task, train_problems=0, test_problems=1)["test"]
    for odd in ("", "139 = 1", "[1, 2", "{}", "[[]]", "nan", "1e999", "\N{SUPERSCRIPT TWO}"):
        assert score_of(problem, odd) < 1
