"""Each benchmark's sample, in its official format, from the file to the reward."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_edo.configuration import compose_run
from nemo_edo.data.answers import answer_format
from nemo_edo.data.benchmarks import BENCHMARKS
from nemo_edo.data.problems import load_problems
from nemo_edo.data.prompts import render_prompt
from nemo_edo.rewards.math_verifier import MathScorer
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Rollout

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "tests/data/benchmarks"
FILES = {name: SAMPLES / f"{name}.jsonl" for name in BENCHMARKS if name != "s1k_eval"} | {
    "s1k_eval": SAMPLES / "s1k_pool.jsonl"
}
STATED = {"boxed": r"So it is $\boxed{%s}$.", "final_answer_is": "The final answer is $%s$.",
          "so_the_answer_is": "2. So the answer is %s."}


def settings(name: str):
    choice = {"gsm8k": "gsm8k_paper", "s1k_eval": "s1k"}.get(name, name)
    needed = ["model.path=/m", "data.train=/a.jsonl", "data.test=/b.jsonl"]
    return compose_run("grpo_gsm8k", [f"data={choice}", *needed]).data


@pytest.mark.parametrize("name", BENCHMARKS)
def test_sample_loads_prompts_and_verifies(verifier, name):
    benchmark, config = BENCHMARKS[name], settings(name)
    assert (config.tested_on if "test" in benchmark.splits else config.benchmark) == name
    assert config.answer_format == benchmark.answers
    loaded = load_problems(FILES[name], on_bad_rows="error", benchmark=name, split="test", check_rows=False)
    problems = [problem for problem in loaded.problems if problem.answer_kind != "text"]
    assert len(problems) >= 20 and verifier.unreadable(problems) == []
    assert all(problem.question in render_prompt(config.prompt, problem.question) for problem in problems)
    answers = answer_format(config.answer_format, config.answer_pattern)
    scorer = ExactAnswerScorer(answers) if name == "gsm8k" else MathScorer(answers, verifier.verify)
    for answer_of, reward in ((lambda p: p.answer, 1.0), (lambda p: "-987654321", 0.0)):
        rollouts = [
            Rollout(p.id, 0, (1,), (2,), (-0.5,), "Think.\n" + STATED[benchmark.answers] % answer_of(p), True, 0, 0)
            for p in problems
        ]
        scored = scorer.score(rollouts, problems)
        assert [item.reward for item in scored] == [reward] * len(problems)
        assert all(item.well_formed for item in scored)


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "s1k_eval"])
def test_other_number_of_rows_than_the_official_one_is_an_error_that_names_both(name, tmp_path):
    path = tmp_path / "part.jsonl"
    path.write_text("\n".join(FILES[name].read_text().splitlines()[:7]))
    split = next(iter(BENCHMARKS[name].splits))
    official = BENCHMARKS[name].splits[split]
    with pytest.raises(ValueError, match=rf"has 7 rows, but .* has {official} .*data\.check_rows"):
        load_problems(path, on_bad_rows="error", benchmark=name, split=split)
    assert len(load_problems(path, on_bad_rows="error", benchmark=name, split=split, check_rows=False).problems) == 7


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_whole_official_file_needs_no_leave_and_its_answers_lose_leading_zeros(name):
    problems = load_problems(FILES[name], on_bad_rows="error", benchmark=name, split="test").problems
    assert len(problems) == 30
    assert all(problem.answer == str(int(problem.answer)) for problem in problems)


@pytest.mark.parametrize(("name", "other", "column"), [
    ("math", "gsm8k", "problem"), ("gsm8k", "math", "question"), ("math500", "math", "answer"),
    ("olympiadbench", "minerva", "final_answer"), ("s1k", "minerva", "solution"), ("aime24", "s1k", None),
])
def test_file_of_another_benchmark_is_an_error_that_names_both_columns(name, other, column):
    with pytest.raises(ValueError) as error:
        load_problems(FILES[other], on_bad_rows="error", benchmark=name, split="test")
    if column is not None:
        assert f'has no "{column}" (its columns: ' in str(error.value)
        assert f"of {BENCHMARKS[name].title} ({BENCHMARKS[name].hub})" in str(error.value)
    else:
        assert "expected a whole number from 0 to 999" in str(error.value)


def test_folder_list_parquet_and_lines_give_the_same_problems(tmp_path):
    import json

    import pandas

    lines = load_problems(FILES["math"], on_bad_rows="error", benchmark="math", check_rows=False).problems
    rows = [json.loads(line) for line in FILES["math"].read_text().splitlines()]
    (tmp_path / "math.json").write_text(json.dumps(rows))
    pandas.DataFrame(rows).to_parquet(tmp_path / "math.parquet")
    for path in (tmp_path / "math.json", tmp_path / "math.parquet", SAMPLES / "MATH/test"):
        found = load_problems(path, on_bad_rows="error", benchmark="math", check_rows=False).problems
        assert sorted((p.question, p.answer) for p in found) == sorted((p.question, p.answer) for p in lines)
        assert len({p.id for p in found}) == len(lines)
    assert found[0].source.endswith("MATH/test/algebra/1.json")


def test_gold_answers_are_the_last_box_the_stated_one_or_the_short_solution():
    math = {p.question: p.answer for p in load_problems(
        FILES["math"], on_bad_rows="error", benchmark="math", check_rows=False).problems}
    assert math["What is the largest prime factor of 91?"] == "13"
    assert math["What is $x$ if $2x=7$?"] == r"\frac{7}{2}"
    s1k = load_problems(FILES["s1k"], on_bad_rows="error", benchmark="s1k", check_rows=False).problems
    by_question = {p.question: p for p in s1k}
    assert by_question["Find $x$ with $5x=45$."].answer == "9"
    assert by_question["Give the sum $1+\\dots+100$."].answer == "5050"
    assert [p.answer_kind for p in s1k].count("text") == 2
    assert s1k[0].solution == "Let me think about it, number 0.\n\nI worked it out above.\n\nThe final answer is 8."
    olympiad = load_problems(FILES["olympiadbench"], on_bad_rows="error", benchmark="olympiadbench", check_rows=False)
    answers = {p.question: p.answer for p in olympiad.problems}
    assert answers["Find all primes below 8."] == "2, 3, 5, 7"
    assert answers["Let all numbers be real.\n\nFor which $a$ has $x^2+a$ no real root?"] == r"(0,\infty)"


@pytest.mark.parametrize(("row", "reason"), [
    ('{"problem": "P", "solution": "It is 5."}', "has no \\boxed{} answer"),
    ('{"problem": "P", "solution": "\\\\boxed{\\\\frac{1}{2}"}', "has no \\boxed{} answer"),
    ('{"problem": "  ", "solution": "\\\\boxed{5}"}', "has a blank question"),
    ('{"problem": 5, "solution": "\\\\boxed{5}"}', '"problem" is of type int'),
    ("{", "is not valid JSON"),
])
def test_bad_row_of_a_benchmark_is_named_with_its_line(tmp_path, row, reason):
    path = tmp_path / "math.jsonl"
    path.write_text('{"problem": "Good", "solution": "\\\\boxed{5}"}\n' + row + "\n")
    with pytest.raises(ValueError) as error:
        load_problems(path, on_bad_rows="error", benchmark="math", check_rows=False)
    assert f"{path}:2: " in str(error.value) and reason in str(error.value)
    skipped = load_problems(path, on_bad_rows="skip", benchmark="math", check_rows=False)
    assert (len(skipped.problems), len(skipped.skipped)) == (1, 1)


def test_text_in_another_language_is_not_the_english_olympiad_file(tmp_path):
    path = tmp_path / "olympiad.jsonl"
    path.write_text(FILES["olympiadbench"].read_text().replace('"language": "English"', '"language": "Chinese"'))
    with pytest.raises(ValueError, match='"language" is Chinese, expected English: the file OE_TO_maths_en_COMP'):
        load_problems(path, on_bad_rows="error", benchmark="olympiadbench")


def test_prompts_of_the_shipped_configs_have_no_placeholder_left():
    for path in sorted((ROOT / "conf/data").glob("*.yaml")):
        prompt = OmegaConf.load(path).get("prompt")
        if prompt is not None:
            assert prompt.count("{question}") == 1
            assert "6*7?" in render_prompt(prompt, "What is 6*7?")
