"""Each benchmark's sample, in its official format, from the file to the reward."""

import json
from pathlib import Path

import pytest
from helpers.responses import scored

from nemo_edo.config import DataConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.data.answers import answer_format
from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.data.problems import LoadedProblems, load_problems, write_problems
from nemo_edo.rewards.verifier import ExactAnswerScorer, MathScorer

SAMPLES = Path(__file__).parents[3] / "tests/data/benchmarks"
FILES = {name: SAMPLES / f"{'s1k_pool' if name == 's1k_eval' else name}.jsonl" for name in BENCHMARKS}
STATED = {"boxed": r"So it is $\boxed{%s}$.", "final_answer_is": "The final answer is $%s$.",
          "so_the_answer_is": "2. So the answer is %s."}


def load(path: Path, name: str, split: str = "train", **changes):
    return load_problems(path, DataConfig(benchmark=name, **changes), split)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_sample_loads_prompts_and_verifies(verifier, name):
    benchmark, choice = BENCHMARKS[name], {"gsm8k": "gsm8k_paper", "s1k_eval": "s1k"}.get(name, name)
    needed = ["model.path=/m", "data.train=/a.jsonl", "data.test=/b.jsonl"]
    config = compose_run("grpo_gsm8k", [f"data={choice}", *needed]).data
    assert (config.tested_on if "test" in benchmark.splits else config.benchmark) == name
    assert config.answer_format == benchmark.answers
    problems = [one for one in load(FILES[name], name, split="test").problems if one.answer_kind != "text"]
    assert len(problems) >= 20 and verifier.verifiable(FILES[name], LoadedProblems(problems, []), "error")
    assert all(problem.question in config.prompt.replace("{question}", problem.question) for problem in problems)
    answers = answer_format(config.answer_format, config.answer_pattern)
    scorer = ExactAnswerScorer(answers) if name == "gsm8k" else MathScorer(answers, verifier)
    for wrong, reward in ((None, 1.0), ("-987654321", 0.0)):
        texts = ["Think.\n" + STATED[benchmark.answers] % (wrong or p.answer) for p in problems]
        rollouts = [scored(p.id, text=text).rollout for p, text in zip(problems, texts, strict=True)]
        found = scorer.score(rollouts, problems)
        assert [item.reward for item in found] == [reward] * len(problems) and all(one.well_formed for one in found)


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "s1k_eval"])
def test_other_number_of_rows_than_the_official_one_is_a_warning_or_an_error_that_names_both(name, tmp_path):
    path = tmp_path / "part.jsonl"
    path.write_text("\n".join(FILES[name].read_text().splitlines()[:7]))
    split, official = next(iter(BENCHMARKS[name].splits.items()))
    with pytest.raises(ValueError, match=rf"has 7 rows, but .* has {official} .*data\.check_rows"):
        load(path, name, check_rows=True, split=split)
    with pytest.warns(UserWarning, match=rf"has 7 rows, but .* has {official}"):
        assert len(load(path, name, split=split).problems) == 7


def test_an_aime_answer_may_have_a_unit_and_is_a_whole_number(tmp_path):
    (tmp_path / "aime.jsonl").write_text("\n".join(
        json.dumps({"problem": answer, "answer": answer}) for answer in (r"$336^\circ$", "070", "1/3", "1000")))
    with pytest.warns(UserWarning, match="has 4 rows"):
        loaded = load(tmp_path / "aime.jsonl", "aime25", on_bad_rows="skip")
    assert [one.answer for one in loaded.problems] == ["336", "70"]


def test_math_s_rows_keep_their_other_columns_and_may_have_the_answer_alone(tmp_path):
    path, kept = tmp_path / "math.jsonl", tmp_path / "kept.jsonl"
    rows = [{"problem": "a", "solution": r"\boxed{5}", "level": "Level 2", "type": "Algebra"},
            {"question": "b", "answer": r"$\frac12$", "level": 3}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match="has 2 rows"):
        problems = load(path, "math").problems
    assert [(p.answer, dict(p.metadata)) for p in problems] == [
        ("5", {"level": "Level 2", "type": "Algebra"}), (r"\frac12", {"level": 3})]  # fmt: skip
    write_problems(kept, problems, benchmark="math", split="test", source={}, skipped=0)
    assert [one.metadata for one in load(kept, "math").problems] == [one.metadata for one in problems]
    odd = [{"problem": "c", "answer": float("nan"), "solution": r"\boxed{5}"}, {"problem": "d", "answer": 2.5},
           {"problem": "e", "answer": ["72"]}, {"problem": "f", "answer": True}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, odd)))
    with pytest.warns(UserWarning, match="has 4 rows"):
        loaded = load(path, "math", on_bad_rows="skip")
    assert ([one.answer for one in loaded.problems], len(loaded.skipped)) == (["5", "2.5"], 2)
    path.write_text(json.dumps({"problem": "a", "gold": "5"}))
    with pytest.raises(ValueError, match=r'has neither "solution" nor "answer"; .*data\.columns\.answer=NAME'):
        load(path, "math")


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
