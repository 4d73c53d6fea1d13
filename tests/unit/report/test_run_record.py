"""A run folder read back: what is missing or malformed is named."""

import re
from pathlib import Path

import pytest
import xxhash
from helpers.experiment_run import write_evaluation
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.report.comparison import compare
from nemo_edo.report.run_record import SEARCH_EVALUATION, read_run, read_test_time
from nemo_edo.report.run_set import one_run
from nemo_edo.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return write_run_folder(tmp_path / "run", arms=("grpo", "edo_floor"), iterations=3, problems=20)


def test_a_run_folder_reads_back_with_its_arms_lines_evaluations_baseline_and_seed(folder):
    record = read_run(folder)
    assert list(record.arms) == ["grpo", "edo_floor"]
    assert list(record.evaluations) == ["warmup", "grpo", "edo_floor"]
    assert record.of("collection", "edo_floor")["iteration"].tolist() == [0, 1, 2]
    comparison = compare(one_run(folder))
    assert (comparison.baseline, comparison.seeds, comparison.problems) == ("grpo", [42], 20)
    assert {d.arm for d in comparison.differences} == {"edo_floor"}


@pytest.mark.parametrize(("name", "spoil", "told"), [
    ("summary.json", lambda text: text.replace('"beta": 0.001, ', "", 1), ": arms.grpo.beta is missing"),
    ("samples.json", lambda text: text.replace(', "reward": 1.0', "", 1), ": entry 0"),
    ("config.yaml", lambda text: "seed: 1\n", ": evaluation.bootstrap is missing"),
    ("samples.json", lambda text: "{", ":1: not valid JSON"),
    *((name, None, ": no such file") for name in (
        "summary.json", "config.yaml", "metrics.jsonl", "samples.json", "evaluations/edo_floor.json")),
])
def test_what_a_file_lacks_is_named_with_the_file(folder, name: str, spoil, told: str):
    text = (folder / name).read_text()
    (folder / name).write_text(spoil(text)) if spoil else (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}{told}"):
        compare(one_run(folder))


@pytest.mark.parametrize(("bad", "message"), [
    ('{"kind": "collection", "arm"', "not valid JSON"), ("[1]", "expected an object with a kind"),
    ('{"kind": "collection", "iteration": 1}', "a collection line without arm"),
    ('{"kind": "train_step", "arm": "grpo", "iteration": 0, "step": 1, "entropy": "high"}', "entropy is 'high'"),
])
def test_a_malformed_line_is_named_by_its_number(folder, bad, message):
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], bad, *lines[1:]]))
    with pytest.raises(UserError, match=f"metrics.jsonl:2: {re.escape(message)}"):
        read_run(folder)


def test_lines_that_are_not_those_that_the_run_logged_are_refused_and_later_ones_are_not(folder):
    path, content = folder / "metrics.jsonl", (folder / "metrics.jsonl").read_bytes()
    mark = {"metrics_bytes": len(content), "metrics_checksum": xxhash.xxh3_128_hexdigest(content)}
    RunFolder(folder).note("warmup", metrics_bytes=0)
    RunFolder(folder).note("grpo", **mark)
    path.write_bytes(content + content.splitlines(keepends=True)[-1])  # of a later nemo-edo evaluate
    assert len(read_run(folder).lines) == len(content.splitlines()) + 1
    for changed in b"", content[: content.rindex(b"\n", 0, -1) + 1], content.replace(b"0.1", b"0.2", 1):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: its first {len(content)} bytes .* restore it"):
            read_run(folder)


def test_a_damaged_config_is_one_line_that_says_what_to_do(folder):
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text()[:30] + "\ncolu")
    with pytest.raises(UserError, match="config.yaml: not YAML: .*; restore it from a copy$") as raised:
        read_run(folder)
    assert "\n" not in str(raised.value)


def test_null_and_nan_values_and_lines_of_other_kinds_are_tolerated(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "collection", "arm": "grpo", "iteration": 3, "reward": NaN, '
                    '"entropy": null}\n{"kind": "note"}\n')
    assert compare(one_run(folder)).matched.accuracies


def curves(folder: Path, problems: int = 2) -> None:
    write_evaluation(folder / "test_time" / "grpo.json", "grpo", {"pass@1": [0.0, 1.0][:problems]})


def search(folder: Path, name: str = "one", problems: int = 2) -> None:
    path = folder / "search" / "grpo" / name / SEARCH_EVALUATION
    write_evaluation(path, "grpo", {"search_accuracy": [1.0] * problems})


def test_an_arm_has_its_curves_and_its_only_search(folder):
    for part, names in ((search, {"search_accuracy"}), (curves, {"pass@1", "search_accuracy"}),
                        (lambda folder: search(folder, "two"), {"pass@1"})):  # of several searches none is taken
        part(folder)
        found = read_test_time(read_run(folder))
        values = {name: sums.tolist() for name, (sums, _) in found["grpo"].metrics.items()}
        expected = {"pass@1": [0, 1], "search_accuracy": [1, 1]}
        assert found.keys() == {"grpo"} and values == {name: expected[name] for name in names}


def test_a_search_of_other_problems_is_an_error(folder):
    curves(folder)
    search(folder, problems=3)
    with pytest.raises(UserError, match="has other problems than"):
        read_test_time(read_run(folder))
