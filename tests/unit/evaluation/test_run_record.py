import json
import re

import pytest

from nemo_edo.errors import UserError
from nemo_edo.evaluation.run_record import compare_run, read_run


@pytest.fixture
def folder(tmp_path, write_run_folder):
    return write_run_folder(tmp_path / "run", arms=("grpo", "edo_floor"), iterations=3, problems=20)


def test_a_run_folder_reads_back_with_its_arms_lines_and_evaluations(folder):
    record = read_run(folder)
    assert list(record.arms) == ["grpo", "edo_floor"]
    assert list(record.evaluations) == ["warmup", "grpo", "edo_floor"]
    assert [line["iteration"] for line in record.of("collection", "edo_floor")] == [0, 1, 2]


def test_the_comparison_takes_baseline_seed_and_bootstrap_from_the_folder(folder):
    comparison = compare_run(read_run(folder))
    assert (comparison.baseline, comparison.seed, comparison.problems) == ("grpo", 42, 20)
    assert {d.arm for d in comparison.differences} == {"edo_floor"}


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "metrics.jsonl", "samples.json",
                                  "evaluations/edo_floor.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{re.escape(str(folder / name))}: no such file"):
        read_run(folder)


@pytest.mark.parametrize(("bad", "message"), [
    ('{"kind": "collection", "arm"', "not JSON"), ("[1]", "expected an object with a kind"),
    ('{"kind": "collection", "iteration": 1}', "a collection line without arm"),
    ('{"kind": "train_step", "arm": "grpo", "iteration": 0, "step": 1, "entropy": "high"}', "entropy is 'high'"),
])
def test_a_malformed_line_is_named_by_its_number(folder, bad, message):
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], bad, *lines[1:]]))
    with pytest.raises(UserError, match=f"metrics.jsonl:2: {re.escape(message)}"):
        read_run(folder)


def test_null_and_nan_values_and_lines_of_other_kinds_are_tolerated(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "collection", "arm": "grpo", "iteration": 3, "reward": NaN, '
                    '"entropy": null}\n{"kind": "note"}\n')
    assert compare_run(read_run(folder)).matched.accuracy is not None


@pytest.mark.parametrize(("change", "message"), [
    ({"sum": [1.0]}, "metrics.accuracy.sum: expected 20 finite numbers"),
    ({"sum": [None] * 20}, "metrics.accuracy.sum: expected 20 finite numbers"),
    ({"sum": ["x"] * 20}, "metrics.accuracy: sum and count must be lists of numbers"),
    ({"count": [-1] * 20}, "metrics.accuracy.count: a count is below 0"),
])
def test_malformed_per_problem_numbers_are_named(folder, change, message):
    path = folder / "evaluations" / "grpo.json"
    record = json.loads(path.read_text())
    record["metrics"]["accuracy"].update(change)
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"grpo.json: {re.escape(message)}"):
        read_run(folder)


def test_a_missing_setting_of_an_arm_is_named(folder):
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    del summary["arms"]["grpo"]["beta"]
    path.write_text(json.dumps(summary))
    with pytest.raises(UserError, match=r"summary.json: arms.grpo.beta is missing"):
        read_run(folder)


def test_a_response_without_reward_is_named_by_its_place(folder):
    path = folder / "samples.json"
    samples = json.loads(path.read_text())
    del samples[1]["responses"]["grpo"][0]["reward"]
    path.write_text(json.dumps(samples))
    with pytest.raises(UserError, match="samples.json: entry 1"):
        read_run(folder)


def test_a_config_without_the_bootstrap_setting_is_named(folder):
    (folder / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match=r"config.yaml: evaluation.bootstrap is missing"):
        compare_run(read_run(folder))
