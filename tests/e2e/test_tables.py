"""Tables, and what a report has of stored responses, from a real run of the built-in task."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEMO_EDO = "import sys; from nemo_edo.cli import main; sys.exit(main())"
SETTINGS = [
    "sft.steps=20", "sft.batch_size=16", "grpo.iterations=2", "grpo.problems_per_iteration=8", "grpo.minibatch_size=16",
    "sampling.max_new_tokens=12", "sampling.samples_per_prompt=4", "evaluation.every=1", "evaluation.rollouts=1",
    "evaluation.bootstrap=50", "data.arithmetic.num_operands=2", "data.arithmetic.test_problems=8",
    "data.arithmetic.train_problems=16", "data.arithmetic.warmup_problems=32", "arms=[grpo,ed_grpo]",
]


def nemo_edo(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NEMO_EDO, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    nemo_edo("train", "--config-name", "experiment/builtin/quickstart", f"output_dir={folder}", *SETTINGS)
    return folder / "builtin_quickstart"


def test_a_table_has_the_runs_own_numbers_apart_from_the_papers(run: Path):
    nemo_edo("report", str(run), "--table", "main", "-o", str(run / "main.csv"))
    with (run / "main.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["comparable"] == "False"]
    assert {row["section"].partition(":")[0] for row in rows} == {"builtin/quickstart"}
    [greedy] = [row for row in rows if (row["row"], row["column"]) == ("GRPO", "greedy")]
    record = json.loads((run / "evaluations" / "grpo.json").read_text())["metrics"]["greedy_accuracy"]
    assert float(greedy["mean"]) == pytest.approx(100 * sum(record["sum"]) / sum(record["count"]))
    assert {row["paper"] for row in rows} == {""}


def test_accuracy_over_iterations_is_what_the_run_logged(run: Path):
    shown = nemo_edo("report", str(run), "--table", "iterations")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    voted = [line["metrics"]["vote@10"]["mean"] for line in lines if line["kind"] == "evaluation"
             and line["arm"] == "grpo"]
    [row] = [line for line in shown.splitlines() if line.startswith("| GRPO |")]
    assert [float(cell.split()[0]) for cell in row.split("|")[2:-2]] == [round(100 * share, 1) for share in voted]


def test_the_report_has_the_case_study_of_the_stored_responses(run: Path):
    page = (run / "report.html").read_text()
    assert 'id="case"' in page and "Majority vote against tokens" in page
