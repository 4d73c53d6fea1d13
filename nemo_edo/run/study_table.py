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

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import default_values, resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation, largest, load_evaluation
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.study_file import Cell

METRICS = (
    *("greedy_accuracy", "accuracy", "vote", "pass", "distinct_4", "distinct_4_pooled", "distinct_answers"),
    *("answer_entropy", "entropy", "well_formed", "response_length", "best_temperature"),
)
CELL = ("task", "arm", "dose", "seed")
COLUMNS = (*CELL, "iteration", "temperature", *METRICS, "problems", "cpu_seconds", "config", "commit", "note")
Row = dict[str, str]


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


def cell_of(row: Row) -> tuple[str, str, str, int]:
    """``Cell.key``."""
    return row["task"], row["arm"], row["dose"], int(row["seed"])


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Adds a cell's rows at once, whatever other processes add."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")), path.open("a", encoding="utf-8", newline="") as file:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)
        file.write(text.getvalue())


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the file's lock, which ends with the process, too. Yields whether it was had: always with ``wait``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def cell_rows(cell: Cell, folder: RunFolder, arm: str, cfg: RunConfig, cpu_seconds: float, commit: str) -> list[Row]:
    """The rows of a finished cell from its run's folder. arm: its name there."""
    shared = {"cpu_seconds": f"{cpu_seconds:.1f}", "config": config_digest(cfg), "commit": commit}
    final = folder.evaluation(arm)
    early = sorted((folder.path / "evaluations" / arm).glob("iter_*.json"))
    places = {path: int(path.stem.removeprefix("iter_")) for path in early}
    places[final] = 0 if cell.arm == arm and not cfg.has_arms else last_iteration(cfg)
    return [
        {**_empty(cell), **shared, "iteration": str(iteration), **values}
        for path, iteration in places.items()
        for values in _by_temperature(load_evaluation(path))
    ]


def stopped_row(cell: Cell, cfg: RunConfig, cpu_seconds: float, commit: str, why: str) -> Row:
    """Of a cell that a guard ended."""
    values = {"cpu_seconds": f"{cpu_seconds:.1f}", "config": config_digest(cfg), "commit": commit}
    return {**_empty(cell), **values, "note": " ".join(why.split())}


def last_iteration(cfg: RunConfig) -> int:
    from nemo_edo.config.compose import arm_configs

    return next(iter(arm_configs(cfg).values())).iterations


def config_digest(cfg: RunConfig) -> str:
    """Of all settings that are not at their defaults, without the run's name and folder: a setting that a later version
    adds does not change it."""
    values = yaml.safe_load(resolved_yaml(cfg))
    changed = _changed({**values, "name": "", "output_dir": ""}, default_values(None))
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and key != "arms":
            value = _changed(value, default)
            if value:
                found[key] = value
        elif value != default:
            found[key] = value
    return found


def _empty(cell: Cell) -> Row:
    return {**dict.fromkeys(COLUMNS, ""), **dict(zip(CELL, map(str, cell.key), strict=True))}


def _by_temperature(evaluation: Evaluation) -> Iterator[Row]:
    """``METRICS`` at each temperature. A metric's name ends with /t0.6 or /best where it is not at the first."""
    suffixes = list(dict.fromkeys(name.partition("/")[2] for name in evaluation.metrics))
    for suffix in suffixes:
        names = [name.partition("/")[0] for name in evaluation.metrics if name.partition("/")[2] == suffix]
        aliases = {"vote": largest(names, "vote@"), "pass": largest(names, "pass@")}
        end = f"/{suffix}" if suffix else ""
        found = {metric: f"{aliases.get(metric, metric)}{end}" for metric in METRICS}
        values = {metric: f"{evaluation.mean(name):.5f}" for metric, name in found.items() if evaluation.has(name)}
        first = f"{getattr(evaluation, 'temperature', 1.0):g}"
        yield {"temperature": suffix.removeprefix("t") or first, "problems": str(len(evaluation.problems)), **values}
