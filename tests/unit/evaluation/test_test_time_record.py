"""What more compute at test time left in a run, read back."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_edo.errors import UserError
from nemo_edo.evaluation.test_time_record import EVALUATION, read_test_time


def write(path: Path, problems: list[str], **metrics: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = {name: {"sum": sums, "count": [1.0] * len(sums)} for name, sums in metrics.items()}
    path.write_text(json.dumps({"arm": "grpo", "problems": problems, "metrics": pairs}))


def read(folder: Path) -> dict:
    return read_test_time(SimpleNamespace(folder=folder, evaluations={"warmup": None, "grpo": None}))


def test_an_arms_only_search_stands_beside_its_curves(tmp_path):
    write(tmp_path / "test_time" / "grpo.json", ["a", "b"], **{"pass@1": [0.0, 1.0]})
    write(tmp_path / "search" / "grpo" / "one" / EVALUATION, ["a", "b"], search_accuracy=[1.0, 1.0])
    found = read(tmp_path)
    assert list(found) == ["grpo"]
    assert {name: sums.tolist() for name, (sums, _) in found["grpo"].metrics.items()} == {
        "pass@1": [0, 1], "search_accuracy": [1, 1]}  # fmt: skip


def test_of_several_searches_none_is_the_arms(tmp_path):
    write(tmp_path / "test_time" / "grpo.json", ["a"], **{"pass@1": [0.0]})
    for name in ("one", "two"):
        write(tmp_path / "search" / "grpo" / name / EVALUATION, ["a"], search_accuracy=[1.0])
    assert list(read(tmp_path)["grpo"].metrics) == ["pass@1"]


def test_a_search_without_curves_is_read_alone(tmp_path):
    write(tmp_path / "search" / "grpo" / "one" / EVALUATION, ["a"], search_accuracy=[1.0])
    assert list(read(tmp_path)["grpo"].metrics) == ["search_accuracy"]


def test_a_search_of_other_problems_is_an_error(tmp_path):
    write(tmp_path / "test_time" / "grpo.json", ["a", "b"], **{"pass@1": [0.0, 1.0]})
    write(tmp_path / "search" / "grpo" / "one" / EVALUATION, ["b", "a"], search_accuracy=[1.0, 1.0])
    with pytest.raises(UserError, match="has other problems than"):
        read(tmp_path)
