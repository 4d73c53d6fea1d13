import dataclasses
import itertools
from pathlib import Path

import pytest

from nemo_edo.builtin_task.arithmetic import (
    STEP_ERRORS,
    Mistakes,
    first_wrong_step,
    make_problems,
    solution_path,
    unordered,
)
from nemo_edo.config import ArithmeticConfig
from nemo_edo.types import Problem

SMALL = ArithmeticConfig(warmup_problems=300, train_problems=20, test_problems=30)


def operands(problem: Problem) -> tuple[int, ...]:
    return tuple(int(number) for number in problem.question.split(" + "))


def is_valid_derivation(*, question: str, text: str) -> bool:
    complete = solution_path(question=question, text=text) is not None
    return complete and first_wrong_step(question, text.strip().split("\n")) is None


def steps(problem: Problem) -> list[tuple[int, int, int]]:
    lines = problem.solution.split("\n")[:-1]
    return [tuple(int(word) for word in line.replace("+", "=").split(" = ")) for line in lines]


@pytest.fixture(scope="module")
def default() -> dict[str, list[Problem]]:
    return make_problems(ArithmeticConfig(), Path("folder"))


def test_no_test_question_is_a_permutation_of_another_question(default):
    sets = {name: {tuple(sorted(operands(problem))) for problem in default[name]} for name in default}
    assert len(sets["test"]) == len(default["test"])
    assert not sets["test"] & (sets["warmup"] | sets["train"])


def test_solutions_are_derivations_of_their_answers_right_except_for_small_errors_of_the_warm_up(default):
    for problem in default["train"] + default["test"]:
        assert problem.answer == str(sum(operands(problem)))
        assert is_valid_derivation(question=problem.question, text=problem.solution)
    for problem in default["warmup"]:
        assert solution_path(question=problem.question, text=problem.solution) is not None
        assert problem.answer == str(steps(problem)[-1][2])
        assert {total - first - second for first, second, total in steps(problem)} <= {0, *STEP_ERRORS}


def test_warmup_steps_are_right_as_often_as_the_config_says_and_weak_facts_wrong_in_one_way(default):
    config, totals = ArithmeticConfig(), {True: {}, False: {}}
    mistakes = Mistakes("arithmetic", config.seed, config.weak_fact_share, config.weak_fact_accuracy, config.step_noise)
    for first, second, total in itertools.chain.from_iterable(map(steps, default["warmup"])):
        of_fact = totals[mistakes.is_weak(unordered(first, second))].setdefault(frozenset((first, second)), [])
        of_fact.append(total - first - second)
    # Four standard errors of a share of n Bernoulli samples.
    for weak, accuracy in ((True, config.weak_fact_accuracy), (False, 1 - config.step_noise)):
        errors = [error for of_fact in totals[weak].values() for error in of_fact]
        n = len(errors)
        assert n > 1000
        assert errors.count(0) / n == pytest.approx(accuracy, abs=4 * (accuracy * (1 - accuracy) / n) ** 0.5)
        wrong = [[error for error in of_fact if error] for of_fact in totals[weak].values()]
        often = [len(set(of_fact)) for of_fact in wrong if len(of_fact) >= 10]
        assert len(often) > 5 and all((ways == 1) is weak for ways in often)


def test_problems_depend_on_the_seed_alone_and_noise_leaves_questions_as_they_are():
    first, again, noisy, other = (make_problems(dataclasses.replace(SMALL, **changes), Path("folder"))
                                  for changes in ({}, {}, {"step_noise": 0.9}, {"seed": 1}))  # fmt: skip
    assert first == again != noisy and first["test"] != other["test"]
    assert [problem.question for problem in first["warmup"]] == [problem.question for problem in noisy["warmup"]]


QUESTION = "6 + 1 + 3 + 1"
EXAMPLE = "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 11"


@pytest.mark.parametrize(("text", "path", "valid"), [
    (EXAMPLE, ((1, 1), (2, 9), (3, 6)), True),
    ("1 + 1 = 2\n3 + 6 = 9\n2 + 9 = 11\n#### 11", ((1, 1), (2, 9), (3, 6)), True),  # another order of the same path
    ("6 + 1 = 7\n7 + 1 = 8\n8 + 3 = 11\n#### 11", ((1, 6), (1, 7), (3, 8)), True),
    ("6 + 3 = 10\n1 + 1 = 2\n10 + 2 = 12\n#### 12", ((1, 1), (2, 10), (3, 6)), False),  # a wrong sum
])
def test_a_path_is_its_sorted_merges_and_valid_if_every_sum_is_right(text, path, valid):
    assert solution_path(question=QUESTION, text=text) == path
    assert is_valid_derivation(question=QUESTION, text=text) is valid


@pytest.mark.parametrize("text", [
    "", "#### 11", "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11",
    "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 12",  # answer differs from the chain
    "6 + 3 = 9\n1 + 1 = 2\n#### 11",  # numbers are left
    "6 + 3 = 9\n6 + 1 = 7\n9 + 7 = 16\n#### 16",  # 6 is used twice
    "6 + 5 = 11\n1 + 1 = 2\n11 + 2 = 13\n#### 13",  # 5 was never there
    "3 + 3 = 6\n1 + 1 = 2\n6 + 2 = 8\n#### 8",  # one 3, taken twice
    "6+3=9\n1 + 1 = 2\n9 + 2 = 11\n#### 11", "06 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 11",
    EXAMPLE + "\n#### 11", EXAMPLE + " apples",
    "6 + 3 = " + "9" * 5000 + "\n#### 1",
])
def test_text_that_is_not_a_derivation_has_no_path(text):
    assert solution_path(question=QUESTION, text=text) is None
    assert not is_valid_derivation(question=QUESTION, text=text)
