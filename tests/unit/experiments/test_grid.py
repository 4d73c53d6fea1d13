"""The runner of grids: each cell once, some at a time, warm-ups shared, and a stop that leaves nothing behind."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_edo.errors import RunStopped
from nemo_edo.experiments.grid import Cell, Grid, run_grid
from nemo_edo.experiments.sweep import plan_sweep
from nemo_edo.run_folder import RunFolder

# Stands in for a training: does as its cell's name says, and writes what it was started with.
STAND_IN = """
import json, os, pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
run = folder / name
print("says", name, os.environ.get("OMP_NUM_THREADS"), "adopts" if (run / "journal.json").exists() else "", flush=True)
(folder / f"{name}.started").touch()
def note(journal):
    (run / "new").write_text(json.dumps(journal))
    (run / "new").replace(run / "journal.json")
if "slow" in name:
    time.sleep(60)
if "fails" in name:
    sys.exit(3)
run.mkdir(exist_ok=True)
(run / "config.yaml").write_text("seed: 2" if "other" in name else sys.argv[3].replace("null", "48"))
if "warm" in name and not (run / "journal.json").exists():
    (run / "checkpoints" / "warmup").mkdir(parents=True)
    (run / "checkpoints" / "warmup" / "weights").write_text("trained")
    (run / "metrics.jsonl").write_text("of the warm-up, guard lines too\\nof an arm\\n")
    said = [json.dumps({"arm": arm, "text": "odd"}) + "\\n" for arm in ("warmup", "grpo")]
    (run / "warnings.jsonl").write_text("".join(said))
    note({"files": {}, "warmup": {"metrics_bytes": 32, "evaluated_again": "again" in name}, "arm": {}})
    deadline = time.monotonic() + 20
    while len(list(folder.glob("warm*.started"))) < 2 and time.monotonic() < deadline:  # while this one still runs
        time.sleep(0.01)
if "warm" in name:
    note({"files": {}, "warmup": {"evaluated_again": "again" in name}, "report": {}})
(run / "summary.json").touch()
"""


@dataclass(frozen=True, kw_only=True)
class StandIn(Cell):
    folder: Path
    warm_up: str | None = None
    config: str = "seed: 1"

    def command(self, processes: int = 1) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(self.folder), self.name, self.config]


class Stands(Grid):
    def __init__(self, folder: Path, *names: str, **made: str) -> None:
        self.folder = folder
        made = {"config_name": "", "overrides": (), "folder": folder, **made}
        self.cells = [StandIn(name=name, **made) for name in names]

    def logs(self) -> list[str]:
        return [self.log(cell).read_text() for cell in self.cells]


def test_a_failing_cell_stops_no_other_and_is_the_only_one_that_is_run_again(tmp_path: Path, capsys):
    grid = Stands(tmp_path, "a", "fails", "b")
    [failure] = run_grid(grid)
    assert (failure.cell.name, failure.status, failure.log) == ("fails", 3, grid.folder / "logs" / "fails.log")
    assert [cell.name for cell in grid.left()] == ["fails"]
    capsys.readouterr()
    run_grid(grid)
    assert capsys.readouterr().out.splitlines()[0] == "2 of 3 runs finished earlier"
    assert [log.count("says") for log in grid.logs()] == [1, 2, 1]


@pytest.mark.parametrize("config", ["seed: 1", "model: {seq_length: null}"])  # a folder has the length that it became
def test_the_first_cell_of_a_warm_up_trains_it_and_the_others_begin_after_it(tmp_path: Path, config: str):
    """The second one starts while the first still trains its arm."""
    grid = Stands(tmp_path, "warm1", "warm2", warm_up="one", config=config)
    assert run_grid(grid, jobs=2) == []
    assert [log.count("adopts") for log in grid.logs()] == [0, 1]
    given = RunFolder(tmp_path / "warm2")
    assert (given.checkpoint("warmup") / "weights").read_text() == "trained"
    assert (given.path / "metrics.jsonl").read_text() == "of the warm-up, guard lines too\n"
    assert (given.path / "warnings.jsonl").read_text() == '{"arm": "warmup", "text": "odd"}\n'
    assert (given.path / "config.yaml").read_text() == config.replace("null", "48")


@pytest.mark.parametrize("first", ["warm_other", "warm_again"])
def test_a_warm_up_whose_run_had_other_settings_or_was_evaluated_with_others_is_not_adopted(tmp_path: Path, first: str):
    """Its cell has the same key, as in a study whose task was changed between two commands."""
    (tmp_path / "warm0.started").touch()  # the first one waits for no other
    grid = Stands(tmp_path, first, "warm2", warm_up="one")
    assert run_grid(grid) == []
    assert [log.count("adopts") for log in grid.logs()] == [0, 0]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_grid_stops_its_cells(tmp_path: Path, sent: signal.Signals):
    grid = Stands(tmp_path, "slow1", "slow2", "later")

    def stop() -> None:
        while len(list(tmp_path.glob("*.started"))) < 2:
            time.sleep(0.01)
        time.sleep(0.5)  # the grid has noted the second one's start
        os.kill(os.getpid(), sent)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RunStopped, match="were stopped"):
        run_grid(grid, jobs=2)
    stopper.join()
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or ())]
    assert not (tmp_path / "later.started").exists()


def test_a_cell_that_has_finished_is_recorded_although_the_grid_is_stopped_meanwhile(tmp_path: Path):
    grid, recorded = Stands(tmp_path, "a", "slow"), []

    def record(cell: Cell, status: int, cpu_seconds: float) -> bool:
        if not recorded:
            recorded.append("begun")
            raise KeyboardInterrupt
        recorded.append((cell.name, status))
        return status == 0

    grid.record = record
    with pytest.raises(RunStopped):
        run_grid(grid, jobs=2)
    assert sorted(recorded[1:]) == [("a", 0), ("slow", -signal.SIGTERM)]


def test_a_finished_cell_that_a_killed_command_did_not_record_is_recorded_and_not_trained_again(tmp_path: Path):
    grid, recorded = Stands(tmp_path, "a", "other"), []
    run_grid(grid)  # of the second, the folder's config is another one
    grid.left = lambda: [cell for cell in grid.cells if cell.name not in recorded]
    grid.record = lambda cell, status, cpu_seconds: recorded.append(cell.name) or status == 0
    run_grid(grid)
    assert sorted(recorded) == ["a", "other"]
    assert [log.count("says") for log in grid.logs()] == [1, 2]


@pytest.mark.parametrize(("swept", "same"), [
    ("grpo.alpha=0,0.1", True), ("arms=[grpo],[noise]", True), ("checkpoint.keep=1,2", True),
    ("sft.steps=5,6", False), ("model.seq_length=64,65", False), ("data.arithmetic.max_operand=8,9", False),
    ("precision.dtype=fp32,bf16", False), ("seed=1,2", False), ("sft.steps=0,600", False),
])  # fmt: skip
def test_cells_share_a_warm_up_where_no_setting_that_reaches_it_or_its_evaluation_differs(swept: str, same: bool):
    first, second = plan_sweep("alpha_sweep", [swept]).cells
    assert (first.warm_up == second.warm_up) is same
    assert (first.warm_up is None) is swept.startswith("sft.steps=0")
