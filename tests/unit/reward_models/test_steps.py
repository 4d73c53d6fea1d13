"""Steps of responses, and the groups of right and wrong ones that a reward model is trained on."""


import pytest
from helpers.responses import scored
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.builtin_task.arithmetic import first_wrong_step
from nemo_edo.config.reward_model import RewardDataConfig
from nemo_edo.reward_models.step_data import held_out, labelled_paths, split_steps, step_groups
from nemo_edo.types import ScoredRollout

QUESTION = "6 + 1 + 3 + 1"
RIGHT = "6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 11"


def response(text: str, reward: float = 0.0, *, problem: str = "p", **fields) -> ScoredRollout:
    return scored(problem, reward=reward, text=text, **fields)


def groups_of(questions, responses, seed: int = 1, **data) -> list:
    return step_groups(questions, responses, RewardDataConfig(**{"positives": 1, "negatives": 2, **data}), None, seed)


@pytest.mark.parametrize(("text", "wrong"), [
    (RIGHT, None),
    ("6 + 3 = 8\n1 + 1 = 2", 0),                    # a wrong sum
    ("6 + 3 = 9\n6 + 1 = 7", 1),                    # 6 is used up
    ("6 + 3 = 9\n1 + 1 = 2\n9 + 2 = 11\n#### 12", 3),
    (f"{RIGHT}\n#### 11", 4),                       # continues after its end
])
def test_first_wrong_step_of_the_built_in_task(text: str, wrong: int | None):
    assert first_wrong_step(QUESTION, split_steps(text, "\n")) == wrong


def test_steps_are_the_texts_between_separators_without_blank_ones():
    assert split_steps("a\r\n\nb\n \n c\n", "\n") == ("a", "b", " c")
    assert split_steps("a\nb\n\n\nc", "\n\n") == ("a\nb", "c")
    assert split_steps(" \n", "\n") == ()


def test_steps_of_wrong_solutions_are_wrong_unless_a_right_one_begins_with_them():
    right, wrong = labelled_paths("q", [response("a\nb\nc", 1.0), response("a\nx"), response("a\nb\nd")], "\n", None)
    assert right == [("a",), ("a", "b"), ("a", "b", "c")]
    assert wrong == [("a", "x"), ("a", "b", "d")]


def test_checked_steps_are_wrong_from_the_first_wrong_one_on_and_right_ones_are_of_right_solutions():
    bad = "6 + 3 = 9\n1 + 1 = 3\n9 + 3 = 12\n#### 12"
    unfinished_right = "6 + 3 = 9\n1 + 1 = 2"  # right steps, but of no right solution
    responses = [response(RIGHT, 1.0), response(bad), response(unfinished_right)]
    right, wrong = labelled_paths(QUESTION, responses, "\n", first_wrong_step)
    assert right == [split_steps(RIGHT, "\n")[:length] for length in (1, 2, 3, 4)]
    assert wrong == [split_steps(bad, "\n")[:length] for length in (2, 3, 4)]
    lucky = "6 + 3 = 8\n1 + 1 = 2\n8 + 2 = 11\n#### 11"  # a right answer by a wrong step gives no right step
    right, wrong = labelled_paths(QUESTION, [response(lucky, 1.0)], "\n", first_wrong_step)
    assert (right, len(wrong), wrong[0]) == ([], 4, ("6 + 3 = 8",))


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 4))
def test_a_group_ranks_a_right_path_against_wrong_ones_first_those_of_its_prefix(rng, positives: int, negatives: int):
    words = [tuple(rng.choice("abc") for _ in range(rng.randint(1, 3))) for _ in range(12)]
    responses = [response("\n".join(word), float(rng.random() < 0.5)) for word in words]
    right, wrong = labelled_paths("q", responses, "\n", None)
    groups = groups_of({"p": "q"}, responses, positives=positives, negatives=negatives)
    assert len(groups) == (min(positives, len(right)) if wrong else 0)
    assert len({group.positive for group in groups}) == len(groups)
    for group in groups:
        assert group.positive in right and set(group.negatives) <= set(wrong)
        assert len(set(group.negatives)) == len(group.negatives) == min(negatives, len(wrong))
        alike = [(path[:-1] != group.positive[:-1], len(path) != len(group.positive)) for path in group.negatives]
        siblings = sum(path[:-1] == group.positive[:-1] for path in wrong)
        assert alike == sorted(alike) and sum(not other for other, _ in alike) == min(siblings, negatives)


def test_held_out_questions_are_a_share_that_depends_on_seed_and_text_alone():
    questions = [f"question {number}" for number in range(1000)]
    out = held_out(questions, 0.2, seed=3)
    assert 150 < len(out) < 250
    assert held_out(questions[::-1][:500], 0.2, seed=3) == out & set(questions[500:])
    assert out != held_out(questions, 0.2, seed=4)
    pairs = [f"question  {number}\n" for number in range(1000)]
    assert {" ".join(text.split()) for text in held_out(pairs, 0.2, seed=3)} == out
