"""A run folder read back: what is missing or malformed is named."""

import re
from pathlib import Path

import pytest
import xxhash
from helpers.experiment_run import write_evaluation
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.report.comparison import compare
from nemo_edo.report.run_record import SEARCH_EVALUATION, read_run
from nemo_edo.report.run_set import one_run
from nemo_edo.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return write_run_folder(tmp_path / "run", arms=("grpo", "edo_floor"), iterations=3, problems=20)


def test_a_run_folder_reads_back_and_nulls_nans_and_lines_of_other_kinds_are_tolerated(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "collection", "arm": "grpo", "iteration": 3, "reward": NaN, '
                    '"entropy": null}\n{"kind": "note"}\n')
    record = read_run(folder)
    assert list(record.evaluations) == ["warmup", *record.arms] == ["warmup", "grpo", "edo_floor"]
    assert record.of("collection", "edo_floor")["iteration"].tolist() == [0, 1, 2]
    assert compare(one_run(folder)).matched.accuracies


LINE = "metrics.jsonl:2: "


@pytest.mark.parametrize(("name", "spoil", "told"), [
    ("summary.json", lambda text: text.replace('"beta": 0.001, ', "", 1), ": arms.grpo.beta is missing"),
    ("config.yaml", lambda text: "seed: 1\n", "config.yaml: evaluation.bootstrap is missing"),
    *(("metrics.jsonl", lambda text, bad=bad: text.replace("\n", f"\n{bad}\n", 1), told) for bad, told in (
        ('{"kind": "collection", "arm"', LINE), ("[1]", LINE),
        ('{"kind": "train_step", "arm": "grpo", "iteration": 0, "step": 1, "entropy": "high"}', "'high'"))),
    *((name, None, f"{name}: no such file") for name in (
        "summary.json", "config.yaml", "metrics.jsonl", "samples.json", "evaluations/edo_floor.json")),
])
def test_what_a_file_lacks_is_named_with_the_file(folder, name: str, spoil, told: str):
    text = (folder / name).read_text()
    (folder / name).write_text(spoil(text)) if spoil else (folder / name).unlink()
    with pytest.raises(UserError, match=told) as raised:
        compare(one_run(folder))
    assert name in str(raised.value) and "\n" not in str(raised.value)


def test_lines_that_are_not_those_that_the_run_logged_are_refused_and_later_ones_are_not(folder):
    path, content = folder / "metrics.jsonl", (folder / "metrics.jsonl").read_bytes()
    mark = {"metrics_bytes": len(content), "metrics_checksum": xxhash.xxh3_128_hexdigest(content)}
    RunFolder(folder).note("warmup", metrics_bytes=0)
    RunFolder(folder).note("grpo", **mark)
    path.write_bytes(content + content.splitlines(keepends=True)[-1])  # of a later nemo-edo evaluate
    assert len(read_run(folder).lines) == len(content.splitlines()) + 1
    for changed in b"", content[: content.rindex(b"\n", 0, -1) + 1], content.replace(b"0.1", b"0.2", 1):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: its first {len(content)} bytes"):
            read_run(folder)


def search(folder: Path, name: str = "one", problems: int = 2) -> None:
    path = folder / "search" / "grpo" / name / SEARCH_EVALUATION
    write_evaluation(path, "grpo", {"search_accuracy": [1.0] * problems})


def test_an_arm_has_its_curves_and_its_only_search_which_has_to_be_of_the_same_problems(folder):
    search(folder)
    assert read_run(folder).test_time["grpo"].metrics.keys() == {"search_accuracy"}
    write_evaluation(folder / "test_time" / "grpo.json", "grpo", {"pass@1": [0.0, 1.0]})
    assert read_run(folder).test_time["grpo"].metrics.keys() == {"pass@1", "search_accuracy"}
    search(folder, "two")  # of several searches none is taken
    assert read_run(folder).test_time["grpo"].metrics.keys() == {"pass@1"}
    (folder / "search" / "grpo" / "two" / SEARCH_EVALUATION).unlink()
    search(folder, problems=3)
    with pytest.raises(UserError, match="has other problems than"):
        read_run(folder)
