"""A model that nothing trains, evaluated in process: killed, gone on with, and evaluated from what it kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SETTINGS = ["--config-name=evaluate", "model=tiny_llama", "data=arithmetic", "precision=fp32", "threads=1",
            "data.arithmetic.test_problems=24", "evaluation.samples=6", "sampling.max_new_tokens=24",
            "generation.part_size=12", "evaluation.bootstrap=50"]  # fmt: skip


def started(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nemo_edo", "evaluate", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip


def done(folder: Path, *arguments: str) -> str:
    process = started(folder, *arguments)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs of one config: "whole", and "killed" once it had drawn some parts of its sampled responses."""
    folder = tmp_path_factory.mktemp("evaluate")
    done(folder, *SETTINGS, "name=whole")
    process = started(folder, *SETTINGS, "name=killed")
    parts = folder / "runs" / "killed" / "evaluations" / "warmup" / "sampled" / "iter_00000" / "parts"
    deadline = time.monotonic() + 300
    while not (parts / "part_00001.parquet").is_file():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return folder


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_numbers(folder: Path):
    killed, whole = (folder / "runs" / name for name in ("killed", "whole"))
    kept = {path.name: path.stat().st_ino for path in killed.rglob("part_*.parquet")}
    assert kept and not (killed / "test_time").exists()
    assert "going on with the unfinished run" in done(folder, *SETTINGS, "name=killed")
    for name in ("test_time", "evaluations"):
        results = [(run / name / "warmup.json").read_bytes() for run in (killed, whole)]
        assert results[0] == results[1]


def test_a_finished_evaluation_draws_nothing_anew_and_says_what_it_found(folder: Path):
    whole = folder / "runs" / "whole"
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.parquet")}
    output = done(folder, *SETTINGS, "name=whole")
    assert "pass@k" in output and before == {path: path.stat().st_mtime_ns for path in whole.rglob("*.parquet")}
    assert not (folder / "runs" / "whole.1").exists()


def test_the_report_and_the_stored_responses_speak_of_one_model(folder: Path):
    whole = folder / "runs" / "whole"
    page = (whole / "report.html").read_text()
    assert "Model as it is" in page and "Warm-up" not in page.split("</dl>")[0]
    assert "warmup: 24 problems" in done(folder, str(whole), "--stored")
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])
    stored = json.loads((whole / "test_time" / "warmup.json").read_text())["metrics"]
    sampled = sum(stored["entropy_sampled"]["sum"]) / sum(stored["entropy_sampled"]["count"])
    assert (line["kind"], line["arm"]) == ("evaluation", "warmup")
    assert sampled == pytest.approx(line["metrics"]["entropy"]["mean"], rel=0.05)


def test_a_second_evaluation_of_the_run_draws_others(folder: Path):
    whole = folder / "runs" / "whole"
    assert "Model as it is" in done(folder, str(whole), "evaluation.samples=2")
    assert len(json.loads((whole / "evaluations" / "warmup.json").read_text())["metrics"]["pass@2"]["sum"]) == 24
    assert "tokens@2" in json.loads((whole / "test_time" / "warmup.json").read_text())["metrics"]


def test_a_config_that_trains_is_refused_and_leaves_nothing(folder: Path):
    process = started(folder, "--config-name=quickstart", "name=none")
    assert "algorithm is grpo: this config trains" in process.communicate(timeout=300)[0]
    assert process.returncode == 2 and not (folder / "runs" / "none").exists()
