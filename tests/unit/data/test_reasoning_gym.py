"""reasoning-gym's tasks as problems with their own scores."""

import json
import sys

import pytest
from helpers.responses import scored

from nemo_edo.data.answers import answer_format
from nemo_edo.data.columns import Columns, plain_values
from nemo_edo.data.reasoning_gym import make, score
from nemo_edo.data.source import load_source, made_problems
from nemo_edo.errors import UserError

SOURCE = "nemo_edo.data.reasoning_gym:make"
pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (it needs a C compiler)")


@pytest.mark.parametrize("task", ["gsm_symbolic", "chain_sum", "rearc", "word_sorting", "mini_sudoku"])
def test_a_tasks_own_solution_scores_1_after_storage_and_another_answer_is_no_success(task: str):
    made = made_problems(SOURCE, {"name": task, "train_problems": 6, "test_problems": 3}, Columns())
    extract = answer_format("hashes_text").extract
    problems = [*made["train"], *made["test"]]
    for problem in problems:
        stored = json.loads(json.dumps(plain_values(problem.metadata)))
        final = extract(problem.solution)
        assert final == problem.answer.strip()  # of any kind, and several lines
        assert score(final_answer=final, metadata=stored) == 1
        wrong = score(final_answer=extract("#### nothing of the kind"), metadata=stored)
        assert 0 <= wrong < 1 and not scored(reward=wrong).success
        assert score(final_answer=None, metadata=stored) == 0
    assert len({problem.question for problem in problems}) == len({problem.id for problem in problems}) == 9
    assert made == made_problems(SOURCE, {"name": task, "train_problems": 6, "test_problems": 3}, Columns())


def test_a_wrong_numbers_reward_is_seen_and_is_no_success():
    [problem] = make("gsm_symbolic", train_problems=0, test_problems=1)["test"]
    assert score(final_answer="-1", metadata=problem.metadata) == 0.01
    assert "so he works for 6 days/week" in problem.solution  # what a warm-up learns


@pytest.mark.parametrize("task", ["prime_factorization", "boxnet", "coin_flip", "game_of_life"])
def test_an_answer_that_a_task_cannot_read_is_wrong_and_ends_no_run(task: str):
    [problem] = make(task, train_problems=0, test_problems=1)["test"]
    for odd in ("", "139 = 1", "[1, 2", "{}", "[[]]", "nan", "1e999", "\N{SUPERSCRIPT TWO}"):
        assert score(final_answer=odd, metadata=problem.metadata) < 1


@pytest.mark.parametrize(("arguments", "message"), [
    ({"name": "gsm_symbol"}, "data.source_args.name is 'gsm_symbol', expected one of ab, acre, "),
    ({"name": "chain_sum", "max_term": 3}, "chain_sum does not take them: .*max_term"),
    ({"name": "chain_sum", "min_terms": 5, "max_terms": 2}, "chain_sum does not take them"),
    ({"name": "coin_flip", "max_trials": 3}, "coin_flip has .* different questions"),
    ({"name": "chain_sum", "test_problems": 0}, "expected at least 0 and 1"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        make(**arguments)


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("reasoning_gym", "nemo_edo.data.reasoning_gym"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"not installed \(reasoning_gym.*\): pip install 'nemo-edo\[reasoning-gym\]'"):
        load_source(SOURCE, {"name": "gsm_symbolic"})
