"""Reads a run folder back, with errors that name the file and the line or key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import (
    ALONE_LABEL,
    MATCHED_MEASURES,
    START,
    UNTRAINED_LABEL,
    ArmSettings,
    Comparison,
    CurvePoint,
    Evaluation,
    compare,
)

REQUIRED_KEYS = {
    "sft_step": ("arm", "step"),
    "train_step": ("arm", "iteration", "step"),
    "collection": ("arm", "iteration"),
    "evaluation": ("arm", "iteration", "metrics"),
}
"""By kind of line in metrics.jsonl; lines of another kind are not the report's concern and are passed over."""
NUMERIC_KEYS = (
    "step",
    "iteration",
    "loss",
    "reward",
    "entropy",
    "kl",
    "distinct_4",
    "well_formed",
    "exploration",
    "floor_fraction",
)


@dataclass(frozen=True)
class RunRecord:
    """A run folder in memory."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    arms: dict[str, ArmSettings]
    lines: tuple[dict[str, Any], ...]
    """metrics.jsonl in order, the kinds of ``REQUIRED_KEYS`` only."""
    evaluations: dict[str, Evaluation]
    samples: list[dict[str, Any]]

    def of(self, kind: str, arm: str) -> list[dict[str, Any]]:
        """The arm's lines of one kind, in order."""
        return [line for line in self.lines if line["kind"] == kind and line["arm"] == arm]


def number(value: float | None) -> float:
    """The value, or NaN where it is null or not finite."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


def read_run(folder: Path) -> RunRecord:
    """Read every file of the run folder. Raises UserError naming the file and the line or key that is wrong."""
    summary = _read_object(folder / "summary.json", ("name", "seed", "versions", "arms", "baseline", "time"))
    arms = {arm: _arm_settings(folder / "summary.json", arm, settings) for arm, settings in summary["arms"].items()}
    config_path = folder / "config.yaml"
    config_text = _read_text(config_path)
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError as error:
        raise UserError(f"{config_path}: not YAML: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{config_path}: expected a mapping of settings, got {type(config).__name__}")
    if not arms and config.get("algorithm") not in ("sft", "none"):
        raise UserError(f"{folder / 'summary.json'}: arms is empty, expected the settings of at least one arm")
    evaluated = [START] if (folder / "evaluations" / f"{START}.json").exists() else []
    evaluations = {arm: load_evaluation(folder / "evaluations" / f"{arm}.json") for arm in (*evaluated, *arms)}
    return RunRecord(
        folder,
        config,
        config_text,
        summary,
        arms,
        tuple(_read_lines(folder / "metrics.jsonl")),
        evaluations,
        _read_samples(folder / "samples.json"),
    )


def compare_run(record: RunRecord) -> Comparison:
    """The comparison of the run's arms, with the bootstrap that its config asks for."""
    return compare(
        record.evaluations,
        {arm: curve(record, arm) for arm in record.arms},
        arms=record.arms,
        baseline=record.summary["baseline"],
        seed=record.summary["seed"],
        resamples=setting(record, "evaluation.bootstrap"),
        alone=UNTRAINED_LABEL if record.config.get("algorithm") == "none" else ALONE_LABEL,
    )


def curve(record: RunRecord, arm: str) -> list[CurvePoint]:
    """The arm's collections, in order."""
    return [
        CurvePoint(number(line.get("reward")), {m: number(line.get(m)) for m in MATCHED_MEASURES})
        for line in record.of("collection", arm)
    ]


def setting(record: RunRecord, key: str) -> Any:
    """A dotted key of the resolved config, which holds them all. Raises UserError if it is missing."""
    value: Any = record.config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{record.folder / 'config.yaml'}: {key} is missing; expected the run's resolved config")
        value = value[part]
    return value


def load_evaluation(path: Path) -> Evaluation:
    """Read ``evaluations/ARM.json``. Raises UserError naming the file and what in it is missing or malformed."""
    record = _read_object(path, ("arm", "problems", "metrics"))
    try:
        problems = tuple(record["problems"])
        pairs = {name: (metric["sum"], metric["count"]) for name, metric in record["metrics"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: expected a list of problems, and sum and count of each metric ({error!r})") from error
    if not problems:
        raise UserError(f"{path}: problems is empty, expected at least one problem")
    metrics = {name: _per_problem(path, name, len(problems), *pair) for name, pair in pairs.items()}
    return Evaluation(record["arm"], problems, metrics)


def _per_problem(path: Path, name: str, size: int, sums: object, counts: object) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: metrics.{name}: sum and count must be lists of numbers") from error
    for key, array in zip(("sum", "count"), arrays, strict=True):
        if array.shape != (size,) or not np.isfinite(array).all():
            raise UserError(f"{path}: metrics.{name}.{key}: expected {size} finite numbers, one for each problem")
    if (arrays[1] < 0).any():
        raise UserError(f"{path}: metrics.{name}.count: a count is below 0")
    return arrays


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a finished run's folder has it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error


def _read_object(path: Path, required: tuple[str, ...]) -> dict[str, Any]:
    record = _read_json(path)
    if not isinstance(record, dict):
        raise UserError(f"{path}: expected an object, got {type(record).__name__}")
    for key in required:
        if key not in record:
            raise UserError(f"{path}: {key} is missing")
    return record


def _arm_settings(path: Path, arm: str, settings: dict[str, Any]) -> ArmSettings:
    names = [field.name for field in fields(ArmSettings)]
    missing = [name for name in names if name not in settings]
    if missing:
        raise UserError(f"{path}: arms.{arm}.{missing[0]} is missing")
    return ArmSettings(**{name: settings[name] for name in names})


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for place, text in enumerate(_read_text(path).split("\n"), start=1):
        if not text:
            continue  # as after the last newline
        where = f"{path}:{place}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} (a line cut off by a kill may be deleted)") from error
        if not isinstance(line, dict) or "kind" not in line:
            raise UserError(f"{where}: expected an object with a kind")
        if line["kind"] not in REQUIRED_KEYS:
            continue
        for key in REQUIRED_KEYS[line["kind"]]:
            if key not in line:
                raise UserError(f"{where}: a {line['kind']} line without {key}")
        for key in NUMERIC_KEYS:
            value = line.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise UserError(f"{where}: {key} is {value!r}, expected a number or null")
        yield line


def _read_samples(path: Path) -> list[dict[str, Any]]:
    samples = _read_json(path)
    if not isinstance(samples, list):
        raise UserError(f"{path}: expected a list of problems, got {type(samples).__name__}")
    for place, sample in enumerate(samples):
        try:
            responses = [response for found in sample["responses"].values() for response in found]
            well_typed = (
                isinstance(sample["question"], str)
                and sample["answer"] is not None
                and all(
                    isinstance(response["text"], str) and isinstance(response["reward"], int | float)
                    for response in responses
                )
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: entry {place}: missing or malformed ({error!r})") from error
        if not well_typed:
            raise UserError(f"{path}: entry {place}: expected question, answer, and text and reward of each response")
    return samples
