"""``nemo-edo study run`` on tiny cells: resumed from its table alone, independent of what ran before a cell, and
stopped without a traceback."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from helpers.cli import finish, start

SIZES = "{name: change, warmup_problems: 64, train_problems: 16, test_problems: 8}"
STUDY = {
    "name": "tiny",
    "seeds": [1],
    "settings": ["sft.steps=6", "sft.batch_size=16", "grpo.iterations=2", "grpo.problems_per_iteration=8",
                 "grpo.minibatch_size=16", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=16",
                 "evaluation.samples=4", "evaluation.bootstrap=20", "evaluation.every=1",
                 "evaluation.temperature=[1.0,0.5]", "evaluation.tuning_problems=4"],
    "tasks": {"change": {"config": "study/change", "settings": [f"data.source_args={SIZES}"]}},
    "arms": {"grpo": {}, "ed_grpo_floor": {"settings": {"alpha": None}, "dose": "exploration_coefficient",
                                           "doses": [0.3]}},
}  # fmt: skip


def rows(folder: Path) -> list[dict]:
    """All but the clock."""
    with (folder / "runs" / "tiny.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "cpu_seconds"} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_study_runs_each_cell_once_and_a_cell_alone_gives_the_same_row(nemo_edo, tmp_path: Path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**STUDY, "keep": "results"}, sort_keys=False))
    nemo_edo.succeed("study", "run", "tiny.yaml", cwd=tmp_path)
    first = rows(tmp_path)
    places = [(row["arm"], row["dose"], row["iteration"], row["temperature"]) for row in first]
    trained = [("0", "1"), ("1", "1"), ("2", "1"), ("2", "0.5")]  # no best: it states no answers
    assert places == [("warmup", "", "0", at) for at in ("1", "0.5")] + [
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
    assert "1 are left" in nemo_edo.succeed("study", "run", "tiny.yaml", "--jobs", "2", cwd=tmp_path)
    assert rows(tmp_path) == first
    assert not (folder / "change,grpo,seed=1").exists()

    # Its folders are runs that a report reads.
    nemo_edo.succeed("report", "runs/earlier/change,*", "-o", "both.html", cwd=tmp_path)
    assert "2 of 2 cells" in nemo_edo.succeed("study", "status", "tiny.yaml", cwd=tmp_path)


@pytest.mark.slow
def test_a_schedulers_stop_of_a_study_with_processes_is_one_line_and_leaves_none_of_them(tmp_path: Path):
    """Its signal reaches the first process alone."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**STUDY, "seeds": [1, 2]}, sort_keys=False))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    study = start("study", "run", "tiny.yaml", "--jobs", "2", cwd=tmp_path, start_new_session=True, **pipes)
    logs = tmp_path / "runs" / "tiny" / "logs"
    wait_for(lambda: study.poll() is not None or sum(file.stat().st_size > 0 for file in logs.glob("*.log")) == 2)
    started = psutil.Process(study.pid).children(recursive=True)  # with servers of rewards, in groups apart
    study.send_signal(signal.SIGTERM)
    _, err = finish(study)
    assert study.returncode != 0 and "were stopped" in err and "Traceback" not in err, err
    wait_for(lambda: not is_there(study.pid), limit_s=20)
    assert psutil.wait_procs(started, timeout=20)[1] == []


def wait_for(condition: Callable[[], bool], limit_s: float = 200) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"not within {limit_s:g} s"
        time.sleep(0.2)


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
