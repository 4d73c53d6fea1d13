"""The tasks of the studies: what their problems are, which mistakes the warm-up learns, and what is verified."""

import math
import re
from importlib.util import find_spec

import pytest

from examples.study_tasks.change import score
from examples.study_tasks.family import TASKS, make
from nemo_edo.builtin_task.model import word_vocabulary, write_tokenizer
from nemo_edo.config.compose import compose_run
from nemo_edo.data.answers import final_answer
from nemo_edo.errors import UserError

SIZES = {"warmup_problems": 60, "train_problems": 20, "test_problems": 30}
GYMS = ("chain", "gcd", "lcm", "legs")  # made by reasoning-gym, which needs a C compiler
EACH = [pytest.param(name, marks=pytest.mark.skipif(
    name in GYMS and find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")) for name in TASKS]
RIGHT = {  # by another way than the task's; the legs of animals are reasoning-gym's
    "residues": lambda *numbers: sum(numbers) % 17, "products": lambda *numbers: math.prod(numbers) % 17,
    "chain": lambda *numbers: sum(numbers), "gcd": math.gcd, "lcm": math.lcm, "change": lambda *_: 0,
}


@pytest.mark.parametrize("name", EACH)
def test_splits_are_disjoint_and_repeatable_and_every_answer_is_right(name: str):
    made = make(name, **SIZES)
    assert {f"{split}_problems": len(problems) for split, problems in made.items()} == SIZES
    questions = [problem.question for problems in made.values() for problem in problems]
    assert len(set(questions)) == len(questions) == sum(SIZES.values())
    assert made == make(name, **SIZES) != make(name, **SIZES, seed=1)
    for problem in (*made["train"], *made["test"]):
        numbers = [int(number.replace(" ", "")) for number in re.findall(r"-? ?\d+", problem.question)]
        assert name not in RIGHT or problem.answer == str(RIGHT[name](*numbers))
        assert problem.solution == ""


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("orders", [{}, {"chain": {"any_order": True, "farthest": 6}, "legs": {"farthest_sum": 6}}])
def test_the_warm_up_is_right_without_mistakes_and_wrong_with_them(name: str, orders: dict):
    settings = {**SIZES, **orders.get(name, {}), "weak_fact_accuracy": 0.0, "step_noise": 0.0}
    for share, expected in ((0.0, 60), (1.0, 0)):
        made = make(name, **settings, weak_fact_share=share)["warmup"]
        right = [
            score([problem.solution], [problem.metadata], [True])[0]["score"] == 1.0
            if name == "change" else final_answer(problem.solution) == problem.answer for problem in made
        ]
        # With every fact wrong a chain can be right by chance, and gcd's remainder of 1 has no wrong one.
        assert sum(right) == expected if share == 0 else sum(right) < 30


def test_a_warm_up_that_repeats_its_problems_has_none_of_the_others():
    made = make("residues", modulus=5, warmup_repeats=True, warmup_problems=90, train_problems=20, test_problems=20)
    operands = {split: [sorted(one.question) for one in problems] for split, problems in made.items()}
    others = [*operands["train"], *operands["test"]]
    assert len(set(map(tuple, others))) == 40 and not any(one in others for one in operands["warmup"])
    assert len({tuple(one) for one in operands["warmup"]}) <= 30 < len({one.solution for one in made["warmup"]})


@pytest.mark.parametrize("name", EACH)
def test_a_tokenizer_of_the_tasks_words_gives_every_text_back(name: str, tmp_path):
    made = make(name, **SIZES)
    texts = [text for problems in made.values() for one in problems for text in (one.question, one.solution)]
    tokens = word_vocabulary([*texts, "\n"])
    tokenizer = write_tokenizer(tmp_path, tokens)
    assert len(tokens) % 64 == 0 and len(set(tokens)) == len(tokens)
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids


@pytest.mark.parametrize(("text", "right"), [
    ("14 - 5 = 9\n9 - 9 = 0\n#### 0", True),
    ("14 - 4 = 10\n10 - 5 = 5\n5 - 5 = 0\n#### 0", True),
    ("14 - 7 = 7\n7 - 7 = 0\n#### 0", False),  # no such coin
    ("14 - 5 = 8\n8 - 4 = 4\n4 - 4 = 0\n#### 0", False),  # a wrong difference
    ("14 - 5 = 9\n9 - 5 = 4\n#### 0", False),  # something is left
    ("14 - 5 = 9\n9 - 5 = 4\n4 - 4 = 0\n#### 4", False),
    ("13 - 4 = 9\n9 - 9 = 0\n#### 0", False),  # another amount
    ("", False),
])
def test_change_takes_any_payment_of_the_amount_and_no_other(text: str, right: bool):
    facts = {"metadata": [{"amount": 14, "coins": [4, 5, 9]}] * 2, "finished": [True, False]}
    assert [one["score"] for one in score(responses=[text] * 2, **facts)] == [float(right), 0.0]


def test_votes_on_change_compare_the_coins_that_are_paid_in_any_order_and_no_verdict():
    texts = ["14 - 5 = 9\n9 - 9 = 0\n#### 0", "14 - 9 = 5\n5 - 5 = 0\n#### 0", "14 - 9 = 6\n6 - 5 = 1\n#### 1",
             "14 - 4 = 10\n10 - 5 = 5\n5 - 5 = 0\n#### 0", "14 - 5 is 9\n#### 0", "#### 0", ""]  # fmt: skip
    found = score(texts, [{"amount": 14, "coins": [4, 5, 9]}] * len(texts), [True] * len(texts))
    assert [one["vote"] for one in found] == ["5 9", "5 9", "5 9", "4 5 5", None, None, None]


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "residue"}, "name is 'residue', expected one of residues, .*did you mean residues"),
    ({"name": "gcd", "larges": 9}, "larges: the task gcd has largest; did you mean largest"),
    ({"name": "gcd", "largest": 9}, "gcd gave 36 different problems, fewer than the 110"),
    ({"name": "gcd", "largest": 1}, "the task gcd does not take them"),
    ({"name": "chain", "step_noise": 1.5}, r"step_noise is 1.5, expected a number in \[0, 1\]"),
    ({"name": "residues", "modulus": 1}, "modulus is 1, expected at least 2"),
])
def test_wrong_settings_are_errors_that_name_the_key(settings, message: str):
    if settings["name"] in GYMS:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with pytest.raises(UserError, match=message):
        make(**{**SIZES, **settings})


@pytest.mark.parametrize("name", EACH)
def test_a_shipped_task_has_as_many_problems_as_its_config_asks_for(name: str):
    arguments = compose_run(f"study/{name}", []).data.source_args
    made = make(**arguments)
    assert len(made["test"]) == arguments["test_problems"] and len(made["warmup"]) == arguments["warmup_problems"]
