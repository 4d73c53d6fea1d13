"""A run's folder: what stands in it, whose it is, and the lines of metrics that are added to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import Evaluation


class RunFolder:
    """``config.yaml``, ``metrics.jsonl``, ``summary.json``, ``rollouts/ARM``, ``checkpoints/ARM``, ``evaluations``,
    ``data`` and ``base`` (the built-in task's problems and model), ``report.html``, and NeMo's logs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.base = path / "base"

    def checkpoint(self, arm: str) -> Path:
        return self.path / "checkpoints" / arm

    def rollouts(self, arm: str) -> Path:
        return self.path / "rollouts" / arm

    def check_free(self, config: str) -> None:
        """Raises UserError where the folder belongs to another run; it may be one of the very same config."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another name=...")
        if not any(self.path.iterdir()):
            return
        if not (self.path / "config.yaml").is_file():
            raise UserError(f"{self.path} exists and holds no config.yaml of a run; choose another name=...")
        there, here = _read_mapping(self.path / "config.yaml"), yaml.safe_load(config)
        different = sorted(_differences(there, here))
        if different:
            key = different[0]
            raise UserError(
                f"{self.path} exists already with another config: {key} is {_at(there, key)!r} there and "
                f"{_at(here, key)!r} here ({len(different)} settings differ); choose another name=..., or remove it"
            )

    def create(self) -> Path | None:
        """Makes the folder, empty. One of an earlier run of the same config is kept under a numbered name, which is
        returned. Raises UserError where it cannot be made."""
        earlier = None
        if self.path.exists() and any(self.path.iterdir()):
            number = 1
            while (earlier := self.path.with_name(f"{self.path.name}.{number}")).exists():
                number += 1
            self.path.rename(earlier)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be made ({error.strerror}); choose another output_dir=...") from error
        return earlier

    def write_config(self, config: str) -> None:
        (self.path / "config.yaml").write_text(config, encoding="utf-8")

    def write_json(self, name: str, value: Any) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    def write_evaluation(self, evaluation: Evaluation) -> None:
        metrics = {
            name: {"sum": sums.tolist(), "count": counts.tolist()}
            for name, (sums, counts) in evaluation.metrics.items()
        }
        record = {"arm": evaluation.arm, "problems": list(evaluation.problems), "metrics": metrics}
        self.write_json(f"evaluations/{evaluation.arm}.json", record)


class MetricsLog:
    """Adds lines to metrics.jsonl, and their numbers to NeMo's loggers. Ranks other than the first write nothing.

    Everything that a clock says is under "time": the rest is the same in every run of a config.
    """

    def __init__(self, path: Path, log_numbers: Callable[[dict[str, float], int], None], *, writes: bool) -> None:
        self._file = path.open("a", encoding="utf-8") if writes else None
        self._log_numbers = log_numbers
        self._start = time.monotonic()
        self._lines: dict[tuple[str, str], int] = {}

    def __call__(self, kind: str, *, arm: str, **values: Any) -> None:
        if self._file is None:
            return
        elapsed = round(time.monotonic() - self._start, 3)
        line = {"kind": kind, "arm": arm, **values, "time": {"elapsed_s": elapsed}}
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError as error:
            raise FloatingPointError(f"{kind} of arm {arm} has a number that is not finite: {values}") from error
        self._file.write(text + "\n")
        self._file.flush()
        index = self._lines[arm, kind] = self._lines.get((arm, kind), -1) + 1
        numbers = {f"{arm}/{kind}/{name}": value for name, value in values.items() if isinstance(value, float)}
        self._log_numbers(numbers, values.get("step", index))


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no config of a run ({error}); choose another name=...") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is no config of a run: it is not a mapping; choose another name=...")
    return config


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = a.keys() | b.keys()
        return [path for key in keys for path in _differences(a.get(key), b.get(key), f"{prefix}{key}.")]
    return [] if a == b else [prefix.rstrip(".")]


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
