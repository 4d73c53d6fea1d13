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

import contextlib
import csv
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import arm_configs, default_values, resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import AT_BEST, START, largest, load_evaluation, seeds_interval
from nemo_edo.experiments.grid import hold
from nemo_edo.metrics import Interval, detectable, holm, mean_p_value
from nemo_edo.report.comparison import LEVEL
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
        table = pd.DataFrame(rows, columns=COLUMNS)
        file.write(table.to_csv(index=False, header=file.tell() == 0, lineterminator="\n"))


def cell_rows(key: CellKey, cfg: RunConfig, folder: RunFolder, cpu_seconds: float, commit: str) -> list[Row]:
    """The rows of a finished cell from its run's folder, one for each evaluation and temperature."""
    arm, iterations = next(((name, arm.iterations) for name, arm in arm_configs(cfg).items()), (START, 0))
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


MARGIN = 0.03
"""The least gain in votes that counts."""
WINNING_SHARE = 0.75
"""The share of the tasks that a candidate has to win."""
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class Gain:
    """A candidate's votes minus a baseline's."""

    task: str
    """A task, or ``ALL_TASKS``: each seed's mean over tasks, minus the plain method's or that of the best baselines."""
    candidate: str
    rival: str
    values: tuple[float, ...]
    """The differences by seed."""
    interval: Interval
    """The mean over seeds with Student's t interval (95 %)."""
    p: float
    """Two-sided; adjusted by Holm's method for all tests of the table."""

    @property
    def detectable(self) -> float:
        """The least true difference that these seeds show with probability 0.8, before any correction."""
        return detectable(self.values)

    @property
    def stands(self) -> bool:
        return self.interval.mean >= MARGIN and self.p < LEVEL


def gains(rows: Iterable[Row], baselines: Sequence[str], *, metric: str = "vote") -> list[Gain]:
    """Whether candidates give better votes than every baseline, the claim of a held-out study: two gains for each task,
    and two for all tasks, of every arm that is not a baseline.

    A gain is vote@N minus that of the plain method, or of the baseline that is best on the task: with the highest mean
    on the same responses, which favours the baselines. Every policy is at the temperature that was best on training
    problems. A training that a guard stopped has no policy to vote with, and counts 0.

    baselines: names of arms; the first is the plain method. The last evaluation of each cell counts. Only complete
    studies are judged: raises ValueError where an arm lacks a seed on some task, for an arm with several doses, and for
    fewer than two seeds.
    """
    votes = _votes(rows, baselines, metric)
    best = votes[[*baselines]].groupby("task", sort=False).mean().idxmax(axis=1)
    rival = pd.Series([votes.at[(task, seed), best[task]] for task, seed in votes.index], votes.index)
    apart: list[tuple[str, str, str, list[float]]] = []
    for candidate in votes.columns.drop([*baselines]):
        over_plain, over_best = votes[candidate] - votes[baselines[0]], votes[candidate] - rival
        for task in best.index:
            apart.append((task, candidate, baselines[0], over_plain[task].tolist()))
            apart.append((task, candidate, best[task], over_best[task].tolist()))
        apart.append((ALL_TASKS, candidate, baselines[0], over_plain.groupby("seed").mean().tolist()))
        apart.append((ALL_TASKS, candidate, "best of each task", over_best.groupby("seed").mean().tolist()))
    adjusted = holm([mean_p_value(values) for *_, values in apart]) if apart else []
    return [
        Gain(task, candidate, other, tuple(values), seeds_interval("vote", values, differences=True), float(p))
        for (task, candidate, other, values), p in zip(apart, adjusted, strict=True)
    ]


def tasks_won(found: Iterable[Gain]) -> dict[str, list[str]]:
    """The tasks on which each candidate is above both baselines: the differences, paired by seed, are at least
    ``MARGIN`` and stand out after Holm's correction of all tests."""
    table = pd.DataFrame([(one.candidate, one.task, one.stands) for one in found], columns=["candidate", "task", "won"])
    both = table[table["task"] != ALL_TASKS].groupby(["candidate", "task"], sort=False)["won"].all()
    return {candidate: list(both[candidate].index[both[candidate]]) for candidate in table["candidate"].unique()}


def verdict(found: Sequence[Gain]) -> str:
    """The verdict in a sentence; a candidate wins that wins ``WINNING_SHARE`` of the tasks."""
    won = tasks_won(found)
    tasks = len({one.task for one in found} - {ALL_TASKS})
    most = math.ceil(WINNING_SHARE * tasks)
    winners = [candidate for candidate, of_candidate in won.items() if len(of_candidate) >= most]
    each = "; ".join(
        f"{candidate} wins {len(names)} of {tasks}" + (f" ({', '.join(names)})" if names else "")
        for candidate, names in won.items()
    )
    head = f"The claim is won by {' and '.join(winners)}" if winners else "No candidate wins the claim"
    return f"{head} (at least {most} of {tasks} tasks): {each}."


def markdown(found: Sequence[Gain]) -> str:
    heads = ["candidate", "task", "minus", "seeds", "difference in votes [95 %]", "detectable", "p (Holm)",
             f"at least {MARGIN:g}"]  # fmt: skip
    lines = [
        [one.candidate, one.task, one.rival, str(len(one.values)),
         f"{one.interval.mean:+.3f} [{one.interval.low:+.3f}, {one.interval.high:+.3f}]", f"{one.detectable:.3f}",
         f"{one.p:.3f}", "yes" if one.stands else "no"]
        for one in found
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def _votes(rows: Iterable[Row], baselines: Sequence[str], metric: str) -> pd.DataFrame:
    """A column for each trained arm, a row for each task and seed; 0 where a guard stopped the training."""
    last = last_rows(rows, AT_BEST.removeprefix("/")).items()
    cells = pd.DataFrame(
        [
            (*cell, 0.0 if row["note"] else float(row[metric]))
            for cell, row in last
            if cell[1] != START and (row["note"] or row[metric])
        ],  # a task without answers has no votes
        columns=["task", "arm", "dose", "seed", "vote"],
    )
    for arm, doses in cells.groupby("arm")["dose"].unique().items():
        if len(doses) > 1:
            raise ValueError(f"{arm} has the doses {' and '.join(doses)}, expected one")
    votes = cells.pivot(index=["task", "seed"], columns="arm", values="vote")
    votes = votes.reindex(cells["task"].unique(), level="task")
    votes = votes.reindex(columns=list(dict.fromkeys([*cells["arm"], *baselines])))
    for task, of_task in votes.groupby("task", sort=False):
        for arm, missing in of_task.isna().items():
            if missing.any():
                raise ValueError(f"{arm} on {task} lacks the seeds {[seed for _, seed in of_task.index[missing]]}")
        if len(of_task) < 2:
            raise ValueError(f"{task} has {len(of_task)} seed, expected at least 2")
    return votes
