"""A study's results: a CSV file with a row for each cell, evaluation and temperature, small enough to be committed.

task, arm, dose, seed      the cell; arm "warmup" is the start of all arms of a task and a seed
iteration                  of the evaluation
temperature                of its responses; "best": the one that was best on training problems, as the policy's
                           ``best_temperature`` says
greedy_accuracy, ...       means over the test problems (``METRICS``); vote and pass are of the largest number
cpu_seconds                of the process, for all of the cell that it did
config                     what the settings were: a digest of all that are not at their defaults
commit                     of the code; a + at its end: some file differed, be it this table alone
note                       why a guard ended the training, which then has no metrics
"""

import contextlib
import csv
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import arm_configs, default_values, resolved_yaml
from nemo_edo.config.run import START
from nemo_edo.errors import UserError
from nemo_edo.experiments.grid import hold
from nemo_edo.run_folder import RunFolder

METRICS = (
    *("greedy_accuracy", "accuracy", "vote", "pass", "distinct_4", "distinct_4_pooled", "distinct_answers"),
    *("answer_entropy", "entropy", "well_formed", "response_length", "best_temperature"),
)
CELL = ("task", "arm", "dose", "seed")
COLUMNS = (*CELL, "iteration", "temperature", *METRICS, "problems", "cpu_seconds", "config", "commit", "note")
Row = dict[str, str]
CellKey = tuple[str, str, str, int]
"""(task, arm, dose, seed)"""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where there is no file. Raises UserError for one with other columns, or a broken row."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if reader.fieldnames is None or tuple(reader.fieldnames) != COLUMNS:
        raise UserError(f"{path}: has the columns {reader.fieldnames}, expected {', '.join(COLUMNS)}")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values() or not row["seed"].isdecimal():
            raise UserError(f"{path}:{number}: is not a row of a study; remove it, and the cell is run again")
    return rows


def cell_of(row: Mapping[str, str]) -> CellKey:
    return row["task"], row["arm"], row["dose"], int(row["seed"])


def last_rows(rows: Iterable[Mapping[str, str]], temperature: str) -> dict[CellKey, Mapping[str, str]]:
    """The last evaluation of each cell at a temperature; of a training that a guard stopped, its row."""
    found: dict[CellKey, Mapping[str, str]] = {}
    for row in rows:
        if row["note"] or row["temperature"] == temperature:
            earlier = found.get(cell_of(row))
            if earlier is None or row["note"] or int(earlier["iteration"] or 0) <= int(row["iteration"]):
                found[cell_of(row)] = row
    return found


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Adds a cell's rows at once, whatever other processes add."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = hold(path.with_name(f".{path.name}.lock"), wait=True)
    with contextlib.closing(lock), path.open("a", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            table.writeheader()
        table.writerows(rows)


def cell_rows(key: CellKey, cfg: RunConfig, folder: RunFolder, cpu_seconds: float, commit: str) -> list[Row]:
    """The rows of a finished cell from its run's folder, one for each evaluation and temperature."""
    from nemo_edo.evaluation.results import largest, load_evaluation  # loads numpy

    arm, iterations = next(((name, arm.iterations) for name, arm in arm_configs(cfg).items()), (START, 0))
    if cfg.early_stop.metric is not None:
        from nemo_edo.run.policy_evaluation import trained_iterations  # loads torch

        iterations = trained_iterations(cfg, folder, arm)
    places = {iteration: folder.evaluation(arm, iteration) for iteration in folder.evaluated_iterations(arm)}
    rows = []
    for iteration, path in {**places, iterations: folder.evaluation(arm)}.items():
        evaluation = load_evaluation(path)
        row = {**_row(key, cfg, cpu_seconds, commit), "iteration": str(iteration)}
        row["problems"] = str(len(evaluation.problems))
        # A metric's name ends with /t0.6 or /best where it is not at the first temperature.
        for suffix in dict.fromkeys(name.partition("/")[2] for name in evaluation.metrics):
            names = [name.partition("/")[0] for name in evaluation.metrics if name.partition("/")[2] == suffix]
            columns = dict(zip(METRICS, METRICS, strict=True))
            columns |= {"vote": largest(names, "vote@"), "pass": largest(names, "pass@")}
            found = {column: f"{name}/{suffix}" if suffix else name for column, name in columns.items()}
            values = {column: f"{evaluation.mean(name):.5f}" for column, name in found.items() if evaluation.has(name)}
            rows.append({**row, "temperature": suffix.removeprefix("t") or f"{evaluation.temperature:g}", **values})
    return rows


def stopped_row(key: CellKey, cfg: RunConfig, cpu_seconds: float, commit: str, why: str) -> Row:
    """The row of a cell that a guard ended."""
    return {**_row(key, cfg, cpu_seconds, commit), "note": " ".join(why.split())}


def _row(key: CellKey, cfg: RunConfig, cpu_seconds: float, commit: str) -> Row:
    shared = {"cpu_seconds": f"{cpu_seconds:.1f}", "config": config_digest(cfg), "commit": commit}
    return {**dict.fromkeys(COLUMNS, ""), **dict(zip(CELL, map(str, key), strict=True)), **shared}


def config_digest(cfg: RunConfig) -> str:
    """A digest of all settings that are not at their defaults, without the run's name and folder: a setting that a
    later version adds does not change it."""
    values = {**yaml.safe_load(resolved_yaml(cfg)), "name": "", "output_dir": ""}
    changed = _changed(values, default_values(None))
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and key != "arms":
            if changed := _changed(value, default):
                found[key] = changed
        elif value != default:
            found[key] = value
    return found
