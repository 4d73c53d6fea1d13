"""Each benchmark's sample, in its official format, from the file to the reward."""

from pathlib import Path

import pytest
from helpers.responses import scored

from nemo_edo.config.compose import compose_run
from nemo_edo.data.answers import answer_format
from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.data.problems import load_problems
from nemo_edo.data.prompts import render_prompt
from nemo_edo.rewards.math_verifier import MathScorer
from nemo_edo.rewards.verifier import ExactAnswerScorer

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "tests/data/benchmarks"
FILES = {name: SAMPLES / f"{'s1k_pool' if name == 's1k_eval' else name}.jsonl" for name in BENCHMARKS}
STATED = {"boxed": r"So it is $\boxed{%s}$.", "final_answer_is": "The final answer is $%s$.",
          "so_the_answer_is": "2. So the answer is %s."}


def settings(name: str):
    choice = {"gsm8k": "gsm8k_paper", "s1k_eval": "s1k"}.get(name, name)
    needed = ["model.path=/m", "data.train=/a.jsonl", "data.test=/b.jsonl"]
    return compose_run("grpo_gsm8k", [f"data={choice}", *needed]).data


def load(path: Path, name: str, on_bad_rows: str = "error", check_rows: bool = False, **changes):
    return load_problems(path, on_bad_rows=on_bad_rows, benchmark=name, check_rows=check_rows, **changes)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_sample_loads_prompts_and_verifies(verifier, name):
    benchmark, config = BENCHMARKS[name], settings(name)
    assert (config.tested_on if "test" in benchmark.splits else config.benchmark) == name
    assert config.answer_format == benchmark.answers
    problems = [one for one in load(FILES[name], name, split="test").problems if one.answer_kind != "text"]
    assert len(problems) >= 20 and verifier.unverifiable(problems) == []
    assert all(problem.question in render_prompt(config.prompt, problem.question) for problem in problems)
    answers = answer_format(config.answer_format, config.answer_pattern)
    scorer = ExactAnswerScorer(answers) if name == "gsm8k" else MathScorer(answers, verifier)
    for wrong, reward in ((None, 1.0), ("-987654321", 0.0)):
        texts = ["Think.\n" + STATED[benchmark.answers] % (wrong or p.answer) for p in problems]
        rollouts = [scored(p.id, text=text).rollout for p, text in zip(problems, texts, strict=True)]
        found = scorer.score(rollouts, problems)
        assert [item.reward for item in found] == [reward] * len(problems) and all(one.well_formed for one in found)


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "s1k_eval"])
def test_other_number_of_rows_than_the_official_one_is_an_error_that_names_both(name, tmp_path):
    path = tmp_path / "part.jsonl"
    path.write_text("\n".join(FILES[name].read_text().splitlines()[:7]))
    split, official = next(iter(BENCHMARKS[name].splits.items()))
    with pytest.raises(ValueError, match=rf"has 7 rows, but .* has {official} .*data\.check_rows"):
        load(path, name, check_rows=True, split=split)
    assert len(load(path, name, split=split).problems) == 7


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_whole_official_file_passes_the_check_of_its_rows_and_its_answers_lose_leading_zeros(name):
    problems = load(FILES[name], name, check_rows=True, split="test").problems
    assert len(problems) == 30 and all(problem.answer == str(int(problem.answer)) for problem in problems)


@pytest.mark.parametrize(("name", "question", "answer"), [
    ("math", "What is the largest prime factor of 91?", "13"), ("math", "What is $x$ if $2x=7$?", r"\frac{7}{2}"),
    ("s1k", "Find $x$ with $5x=45$.", "9"),
    ("olympiadbench", "Find all primes below 8.", "2, 3, 5, 7"),
    ("olympiadbench", "Let all numbers be real.\n\nFor which $a$ has $x^2+a$ no real root?", r"(0,\infty)"),
])
def test_gold_answers_are_the_last_box_the_stated_one_or_the_short_solution(name: str, question: str, answer: str):
    assert {p.question: p.answer for p in load(FILES[name], name).problems}[question] == answer
