"""``nemo-edo study run`` on tiny cells: resumed from its table alone, and independent of what ran before a cell."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from helpers.cli import Cli

SIZES = "{name: change, warmup_problems: 64, train_problems: 16, test_problems: 8}"
STUDY = {
    "name": "tiny",
    "seeds": [1],
    "settings": ["sft.steps=12", "sft.batch_size=16", "grpo.iterations=2", "grpo.problems_per_iteration=8",
                 "grpo.minibatch_size=40", "evaluation.bootstrap=20", "evaluation.every=1",
                 "evaluation.temperature=[1.0,0.5]", "evaluation.tuning_problems=4"],
    "tasks": {"change": {"config": "study/change", "settings": [f"data.source_args={SIZES}"]}},
    "arms": {"grpo": {}, "ed_grpo_floor": {"settings": {"alpha": None}, "dose": "exploration_coefficient",
                                           "doses": [0.3]}},
}  # fmt: skip


def rows(folder: Path) -> list[dict]:
    """All but the clock."""
    with (folder / "runs" / "tiny.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "cpu_seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def cli():
    with Cli() as cli:
        yield cli


@pytest.mark.slow
def test_a_study_runs_each_cell_once_and_a_cell_alone_gives_the_same_row(cli: Cli, tmp_path: Path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**STUDY, "keep": "results"}, sort_keys=False))
    cli.succeed("study", "run", "tiny.yaml", cwd=tmp_path)
    first = rows(tmp_path)
    places = [(row["arm"], row["dose"], row["iteration"], row["temperature"]) for row in first]
    trained = [("0", "1"), ("1", "1"), ("2", "1"), ("2", "0.5"), ("2", "best")]
    assert places == [("warmup", "", "0", at) for at in ("1", "0.5", "best")] + [
        (arm, dose, *place) for arm, dose in (("grpo", ""), ("ed_grpo_floor", "0.3")) for place in trained]
    start = {key: first[0][key] for key in ("accuracy", "entropy", "distinct_4")}
    assert all({key: row[key] for key in start} == start for row in first if row["iteration"] == "0"
               and row["temperature"] == "1")

    # The last cell again, in a fresh process and without any folder: the table alone says what is done.
    folder = tmp_path / "runs" / "tiny"
    assert not (folder / "change,grpo,seed=1" / "checkpoints").exists()  # keep: results
    folder.rename(tmp_path / "runs" / "earlier")
    table = tmp_path / "runs" / "tiny.csv"
    kept = [line for line in table.read_text().splitlines(keepends=True) if "ed_grpo_floor" not in line]
    table.write_text("".join(kept))
    assert "1 are left" in cli.succeed("study", "run", "tiny.yaml", "--jobs", "2", cwd=tmp_path)
    assert rows(tmp_path) == first
    assert not (folder / "change,grpo,seed=1").exists()

    # Its folders are runs that a report reads.
    cli.succeed("report", "runs/earlier/change,*", "-o", "both.html", cwd=tmp_path)
    assert "2 of 2 cells" in cli.succeed("study", "status", "tiny.yaml", cwd=tmp_path)
