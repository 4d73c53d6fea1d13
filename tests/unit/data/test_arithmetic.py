import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.config import ArithmeticConfig
from nemo_edo.data.arithmetic import (
    STEP_ERRORS,
    is_valid_derivation,
    is_weak_fact,
    max_number,
    solution_path,
    write_dataset,
)
from nemo_edo.data.problems import load_problems
from nemo_edo.types import Problem

SMALL = ArithmeticConfig(warmup_problems=300, train_problems=20, test_problems=30)


def operands(problem: Problem) -> tuple[int, ...]:
    return tuple(int(number) for number in problem.question.split(" + "))


def steps(problem: Problem) -> list[tuple[int, int, int]]:
    lines = problem.solution.split("\n")[:-1]
    return [tuple(int(word) for word in line.replace("+", "=").split(" = ")) for line in lines]


def load(path) -> list[Problem]:
    return load_problems(path, on_bad_rows="error").problems


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> dict[str, list[Problem]]:
    files = write_dataset(tmp_path_factory.mktemp("arithmetic"), ArithmeticConfig())
    return {name: load(getattr(files, name)) for name in ("warmup", "train", "test")}


def test_default_sizes_are_reached_with_operands_from_the_whole_range(default):
    assert {name: len(problems) for name, problems in default.items()} == {"warmup": 4096, "train": 1280, "test": 256}
    assert {operand for problem in default["warmup"] for operand in operands(problem)} == set(range(10))
    assert {len(operands(problem)) for problems in default.values() for problem in problems} == {4}


def test_no_test_question_is_a_permutation_of_another_question(default):
    test = {tuple(sorted(operands(problem))) for problem in default["test"]}
    learned = {tuple(sorted(operands(problem))) for name in ("warmup", "train") for problem in default[name]}
    assert len(test) == len(default["test"])
    assert not test & learned


def test_no_question_occurs_twice(default):
    questions = [problem.question for problems in default.values() for problem in problems]
    assert len(set(questions)) == len(questions) == 4096 + 1280 + 256


def test_train_and_test_answers_are_right_and_derived(default):
    for problem in default["train"] + default["test"]:
        assert problem.answer == str(sum(operands(problem)))
        assert is_valid_derivation(question=problem.question, text=problem.solution)


def test_warmup_answers_agree_with_their_chain_and_errors_are_small(default):
    for problem in default["warmup"]:
        assert solution_path(question=problem.question, text=problem.solution) is not None
        assert problem.answer == str(steps(problem)[-1][2])
        assert {total - first - second for first, second, total in steps(problem)} <= {0, *STEP_ERRORS}


def test_warmup_steps_are_right_as_often_as_the_config_says(default):
    config = ArithmeticConfig()
    right: dict[bool, list[bool]] = {True: [], False: []}
    for first, second, total in itertools.chain.from_iterable(steps(problem) for problem in default["warmup"]):
        right[is_weak_fact(first, second, config)].append(first + second == total)
    # Four standard errors of a share of n Bernoulli draws.
    for weak, accuracy in ((True, config.weak_fact_accuracy), (False, 1 - config.step_noise)):
        n = len(right[weak])
        assert n > 1000
        assert sum(right[weak]) / n == pytest.approx(accuracy, abs=4 * (accuracy * (1 - accuracy) / n) ** 0.5)


def test_share_of_weak_facts_is_the_configured_one_and_order_of_summands_is_irrelevant():
    config = ArithmeticConfig(weak_fact_share=0.3)
    facts = list(itertools.combinations_with_replacement(range(60), 2))
    weak = [is_weak_fact(first, second, config) for first, second in facts]
    assert weak == [is_weak_fact(second, first, config) for first, second in facts]
    assert sum(weak) / len(weak) == pytest.approx(0.3, abs=4 * (0.21 / len(weak)) ** 0.5)
    assert not any(is_weak_fact(*fact, ArithmeticConfig(weak_fact_share=0.0)) for fact in facts)


def test_noise_free_warmup_is_all_right(tmp_path):
    config = dataclasses.replace(SMALL, weak_fact_accuracy=1.0, step_noise=0.0)
    problems = load(write_dataset(tmp_path, config).warmup)
    assert all(is_valid_derivation(question=problem.question, text=problem.solution) for problem in problems)


def test_files_depend_on_the_seed_alone_and_noise_leaves_questions_as_they_are(tmp_path):
    def contents(name: str, **changes: object) -> tuple[bytes, ...]:
        files = write_dataset(tmp_path / name, dataclasses.replace(SMALL, **changes))
        return tuple(path.read_bytes() for path in (files.warmup, files.train, files.test))

    first = contents("first")
    assert contents("again") == first
    assert contents("other", seed=1)[2] != first[2]
    contents("noisy", step_noise=0.9)
    folders = (tmp_path / "first", tmp_path / "noisy")
    questions = [[problem.question for problem in load(folder / "warmup.jsonl")] for folder in folders]
    assert questions[0] == questions[1]


def test_every_number_is_at_most_the_largest_even_with_all_steps_wrong(tmp_path):
    config = ArithmeticConfig(num_operands=3, max_operand=1, warmup_problems=3, train_problems=1, test_problems=1,
                              weak_fact_share=0.0, step_noise=1.0)
    assert max_number(config) == 3 + 2 * 2
    for seed in range(30):
        problems = load(write_dataset(tmp_path, dataclasses.replace(config, seed=seed)).warmup)
        numbers = [number for problem in problems for step in steps(problem) for number in step]
        assert 0 <= min(numbers) <= max(numbers) <= max_number(config)


@pytest.mark.parametrize("sizes", [{"test_problems": 716}, {"warmup_problems": 9990}, {"train_problems": 10_000}])
def test_impossible_sizes_are_an_error_with_the_numbers(tmp_path, sizes):
    with pytest.raises(ValueError, match=r"4 operands from 0 to 9 make 715 multisets \(10000 questions\)") as error:
        write_dataset(tmp_path, dataclasses.replace(SMALL, **sizes))
    assert str(next(iter(sizes.values()))) in str(error.value)


def test_sizes_are_met_exactly_where_the_test_leaves_enough_questions(tmp_path):
    config = ArithmeticConfig(num_operands=2, max_operand=1, test_problems=2, train_problems=1, warmup_problems=1)
    sizes = []
    for seed in range(20):  # three multisets: {0,0}, {0,1} with two questions, {1,1}
        try:
            files = write_dataset(tmp_path, dataclasses.replace(config, seed=seed))
        except ValueError as error:
            sizes.append(1)
            assert "leaves 1 questions" in str(error)
        else:
            sizes.append(2)
            assert sorted(operands(load(files.train)[0]) + operands(load(files.warmup)[0])) == [0, 0, 1, 1]
    assert set(sizes) == {1, 2}


QUESTION = "6 + 1 + 3 + 1"
EXAMPLE = "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 11"


def test_example_of_the_task_is_a_valid_derivation_with_sorted_merges():
    assert is_valid_derivation(question=QUESTION, text=EXAMPLE)
    assert solution_path(question=QUESTION, text=EXAMPLE) == ((1, 1), (2, 9), (3, 6))


def test_order_of_summands_and_of_independent_lines_is_the_same_path():
    other = "1 + 1 = 2\n3 + 6 = 9\n2 + 9 = 11\n#### 11"
    assert solution_path(question=QUESTION, text=other) == solution_path(question=QUESTION, text=EXAMPLE)
    third = "6 + 1 = 7\n7 + 1 = 8\n8 + 3 = 11\n#### 11"
    assert solution_path(question=QUESTION, text=third) != solution_path(question=QUESTION, text=EXAMPLE)


def test_wrong_sum_has_a_path_but_is_not_valid():
    text = "6 + 3 = 10\n1 + 1 = 2\n10 + 2 = 12\n#### 12"
    assert solution_path(question=QUESTION, text=text) == ((1, 1), (2, 10), (3, 6))
    assert not is_valid_derivation(question=QUESTION, text=text)


@pytest.mark.parametrize("text", [
    "", "#### 11", "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11",
    "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 12",  # answer differs from the chain
    "6 + 3 = 9\n1 + 1 = 2\n#### 11",  # numbers are left
    "6 + 3 = 9\n6 + 1 = 7\n9 + 7 = 16\n#### 16",  # 6 is used twice
    "6 + 5 = 11\n1 + 1 = 2\n11 + 2 = 13\n#### 13",  # 5 was never there
    "3 + 3 = 6\n1 + 1 = 2\n6 + 2 = 8\n#### 8",  # one 3, taken twice
    "6+3=9\n1 + 1 = 2\n9 + 2 = 11\n#### 11", "06 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 11",
    "6 + 3 = 9\n\n1 + 1 = 2\n9 + 2 = 11\n#### 11", "6 + 3 = 9 <unk>\n1 + 1 = 2\n9 + 2 = 11\n#### 11",
    EXAMPLE + "\n#### 11", EXAMPLE + " apples", EXAMPLE + "\n11 + 0 = 11",
    "6 + 3 = " + "9" * 5000 + "\n#### 1",
])
def test_text_that_is_no_derivation_has_no_path(text):
    assert solution_path(question=QUESTION, text=text) is None
    assert not is_valid_derivation(question=QUESTION, text=text)


def enumerate_derivations(left: tuple[int, ...], lines: tuple[str, ...] = ()) -> list[str]:
    """Every derivation of distinct-looking numbers, by brute force."""
    if len(left) == 1:
        return ["\n".join([*lines, f"#### {left[0]}"])]
    derivations = []
    for i, j in itertools.permutations(range(len(left)), 2):
        rest = tuple(number for k, number in enumerate(left) if k not in (i, j))
        line = f"{left[i]} + {left[j]} = {left[i] + left[j]}"
        derivations += enumerate_derivations((*rest, left[i] + left[j]), (*lines, line))
    return derivations


def test_four_distinct_operands_have_144_derivations_and_15_paths():
    texts = set(enumerate_derivations((1, 2, 4, 8)))
    assert len(texts) == 144
    assert all(is_valid_derivation(question="1 + 2 + 4 + 8", text=text) for text in texts)
    assert len({solution_path(question="1 + 2 + 4 + 8", text=text) for text in texts}) == 15


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_altering_one_character_of_a_valid_derivation_never_leaves_it_valid_with_another_answer(numbers, rng):
    question = " + ".join(map(str, numbers))
    text = rng.choice(enumerate_derivations(tuple(numbers)))
    assert is_valid_derivation(question=question, text=text)
    place = rng.randrange(len(text))
    altered = text[:place] + rng.choice("0123456789 +=#\nx") + text[place + 1 :]
    if is_valid_derivation(question=question, text=altered):
        assert altered.split("\n")[-1] == f"#### {sum(numbers)}"


def test_a_weak_fact_is_wrong_in_one_way_and_other_facts_in_several(tmp_path):
    config = dataclasses.replace(ArithmeticConfig(), warmup_problems=3000)
    wrong: dict[tuple[int, int], list[int]] = {}
    for problem in load_problems(write_dataset(tmp_path, config).warmup, on_bad_rows="error").problems:
        for first, second, total in steps(problem):
            if total != first + second:
                wrong.setdefault((min(first, second), max(first, second)), []).append(total)
    often = {fact: totals for fact, totals in wrong.items() if len(totals) >= 10}
    weak = [set(totals) for fact, totals in often.items() if is_weak_fact(*fact, config)]
    others = [set(totals) for fact, totals in often.items() if not is_weak_fact(*fact, config)]
    assert len(weak) > 5 and all(len(totals) == 1 for totals in weak)
    assert len(others) > 5 and all(len(totals) > 1 for totals in others)
