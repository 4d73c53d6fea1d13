"""Reads a run folder back, with errors that name the file and the line or key."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xxhash

from nemo_edo.config.arms import REPLICATE
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, Evaluation, check_arm_names, load_evaluation
from nemo_edo.utils.files import read_json, read_mapping, read_object, read_text

RESTORE = "restore it from a copy"
REQUIRED_KEYS = {
    "sft_step": ("arm", "step"),
    "train_step": ("arm", "iteration", "step"),
    "collection": ("arm", "iteration"),
    "evaluation": ("arm", "iteration", "metrics"),
    "phases": ("arm", "time"),
}
"""Required keys by kind of line in metrics.jsonl; the report ignores lines of other kinds."""
NUMERIC_KEYS = (
    *("step", "iteration", "loss", "reward", "entropy", "kl", "distinct_4", "well_formed", "exploration"),
    "floor_fraction",
)

START_LABEL = "Start (before RL)"
ALONE_LABEL = "SFT"
"""The label of the same policy in a run without arms, which trains nothing but the warm-up."""
UNTRAINED_LABEL = "Model as it is"
SEARCH_EVALUATION = "evaluation.json"
"""The file in a search's folder with the accuracy of each problem."""
SEARCH_ACCURACY = "search_accuracy"


@dataclass(frozen=True)
class ArmSettings:
    """What sets an arm apart, as the run's summary records it."""

    label: str
    alpha: float | None
    beta: float
    exploration_weight: float
    """alpha * beta, or the coefficient that replaces it."""
    log_ratio_floor: float | None
    entropy_coefficient: float
    iterations: int


@dataclass(frozen=True, eq=False)
class RunRecord:
    folder: Path
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    arms: dict[str, ArmSettings]
    lines: pd.DataFrame
    """metrics.jsonl, a row for each line of the kinds of ``REQUIRED_KEYS``, in order; NaN where a line lacks a key."""
    evaluations: dict[str, Evaluation]
    replicate: Evaluation | None
    """The evaluation of the baseline, trained again with other samples (``replicate_baseline``). It is not an arm."""
    test_time: dict[str, Evaluation]
    """The curves of ``test_time/ARM.json`` (``nemo-edo evaluate --stored``) by evaluated policy, and its
    ``search_accuracy`` where ``search/ARM`` has exactly one search (``nemo-edo search``)."""
    samples: list[dict[str, Any]]
    changed: list[str] = field(default_factory=list)
    """Inputs that had changed when the run resumed or was evaluated again, in sentences."""

    @property
    def seed(self) -> int:
        return self.summary["seed"]

    def label(self, arm: str) -> str:
        if arm != START:
            return self.arms[arm].label
        if self.arms:
            return START_LABEL
        return UNTRAINED_LABEL if self.config.get("algorithm") == "none" else ALONE_LABEL

    def of(self, kind: str, arm: str) -> pd.DataFrame:
        return self.lines[(self.lines["kind"] == kind) & (self.lines["arm"] == arm)]


def read_run(folder: Path) -> RunRecord:
    """Reads every file of the run folder. Raises UserError naming the file and the line or key that is wrong."""
    path = folder / "summary.json"
    summary = read_object(path, ("name", "seed", "versions", "arms", "baseline", "time"))
    if not isinstance(summary["arms"], dict):
        raise UserError(f"{path}: arms is {summary['arms']!r}, expected an object; {RESTORE}")
    check_arm_names(summary["arms"])
    arms = {}
    for arm, settings in summary["arms"].items():
        try:
            arms[arm] = ArmSettings(**{field.name: settings[field.name] for field in fields(ArmSettings)})
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: arms.{arm}.{error.args[0]} is missing; {RESTORE}") from error
    config = read_mapping(folder / "config.yaml")
    evaluated = [START] if (folder / "evaluations" / f"{START}.json").exists() else []
    evaluated += arms
    arms.pop(REPLICATE, None)
    evaluations = {arm: load_evaluation(folder / "evaluations" / f"{arm}.json") for arm in evaluated}
    replicate = evaluations.pop(REPLICATE, None)
    samples = read_json(folder / "samples.json")
    needed = {"question", "answer"}
    if not isinstance(samples, list) or not all(isinstance(one, dict) and needed <= one.keys() for one in samples):
        raise UserError(f"{folder / 'samples.json'}: expected problems, each with question and answer; {RESTORE}")
    text, lines = read_text(folder / "config.yaml"), _read_lines(folder / "metrics.jsonl")
    test_time = {arm: found for arm in evaluations if (found := _read_test_time(folder, arm))}
    journal = folder / "journal.json"
    files = read_object(journal, ()).get("files", {}) if journal.is_file() else {}
    changed = [str(sentence) for sentence in files.get("changed", [])]
    return RunRecord(folder, config, text, summary, arms, lines, evaluations, replicate, test_time, samples, changed)


def setting(record: RunRecord, key: str) -> Any:
    """A dotted key of the resolved config, which holds them all. Raises UserError if it is missing."""
    value: Any = record.config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{record.folder / 'config.yaml'}: {key} is missing; expected the run's resolved config")
        value = value[part]
    return value


def _read_test_time(folder: Path, arm: str) -> Evaluation | None:
    path = folder / "test_time" / f"{arm}.json"
    searches = sorted((folder / "search" / arm).glob(f"*/{SEARCH_EVALUATION}"))
    evaluations = [load_evaluation(path)] if path.is_file() else []
    evaluations += [load_evaluation(searches[0])] if len(searches) == 1 else []
    if not evaluations:
        return None
    if len({evaluation.problems for evaluation in evaluations}) > 1:
        raise UserError(f"{searches[0]}: has other problems than {path}, or another order; search them again")
    metrics = {name: value for evaluation in evaluations for name, value in evaluation.metrics.items()}
    return replace(evaluations[0], metrics=metrics)


def lines_table(lines: list[dict[str, Any]]) -> pd.DataFrame:
    """``RunRecord.lines`` of the parsed lines. Raises ValueError where a number is something else."""
    frame = pd.DataFrame(lines)
    columns = dict.fromkeys(("kind", "arm", *NUMERIC_KEYS, "metrics", "final", "time", *frame.columns))
    frame = frame.reindex(columns=list(columns))
    frame[[*NUMERIC_KEYS]] = frame[[*NUMERIC_KEYS]].astype(float).replace([np.inf, -np.inf], np.nan)
    return frame


def _read_lines(path: Path) -> pd.DataFrame:
    """The lines, once they are found to begin with those that the run had logged by its last stage."""
    text, lines = read_text(path), []
    content, journal = text.encode(), path.with_name("journal.json")
    stages = read_object(journal, ()) if journal.is_file() else {}
    for mark in [mark for mark in stages.values() if "metrics_checksum" in mark][-1:]:  # earlier versions had none
        size = mark["metrics_bytes"]
        if len(content) < size or xxhash.xxh3_128_hexdigest(content[:size]) != mark["metrics_checksum"]:
            raise UserError(f"{path}: its first {size} bytes are not those that were written; {RESTORE}")
    for place, one in enumerate(text.split("\n"), start=1):
        try:
            line = json.loads(one or "{}")
            required = REQUIRED_KEYS.get(line.get("kind"), ())
            if missing := [key for key in required if key not in line]:
                raise ValueError(f"a {line['kind']} line without {missing[0]}")
        except (ValueError, AttributeError) as error:
            said = f"{path}:{place}: {error} (a line that a kill cut off may go; otherwise {RESTORE})"
            raise UserError(said) from error
        lines += [line] if required else []
    try:
        return lines_table(lines)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}; {RESTORE}") from error
