"""The lines of metrics.jsonl, written as a run measures them and cut where it resumes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from nemo_edo.errors import UserError
from nemo_edo.run.folder import RESTORE

PLACES = ("iteration", "policy_version", "step")
"""Numbers of a line that say where it belongs, and are not measurements."""


class MetricsLog:
    """Adds lines to metrics.jsonl, and their numbers to NeMo's loggers.

    Everything that a clock says is under "time": the rest is the same in every run of a config. The loggers get a
    line's numbers under ARM/KIND/NAME, those under "time" as well, and the mean of a metric that has an interval; at
    the line's "step", otherwise its "iteration", otherwise the number of such lines before it.
    """

    def __init__(
        self,
        path: Path,
        log_numbers: Callable[[dict[str, float], int], None],
        *,
        watch: Callable[[str, dict[str, Any]], None] | None = None,
        pending: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """watch: gets the kind of each line that was written, and its values with its clocks. pending: returns the
        seconds of each phase that no line has yet."""
        try:
            self._file = path.open("a", encoding="utf-8")
        except IsADirectoryError as error:
            raise UserError(f"{path} is a folder, where the lines of the metrics are to be; {RESTORE}") from error
        self._digest = xxhash.xxh3_128(path.read_bytes())
        self._log_numbers = log_numbers
        self._watch = watch
        self._pending = pending
        self._start = time.monotonic()
        self._lines: Counter[tuple[str, str]] = Counter()

    def __call__(self, kind: str, *, arm: str, **values: Any) -> None:
        clocks = values.pop("time", {})
        line = {"kind": kind, "arm": arm, **values, "time": {"elapsed_s": round(self.elapsed, 3), **clocks}}
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError as error:
            raise FloatingPointError(f"{kind} of arm {arm} has a number that is not finite: {values}") from error
        self._file.write(text + "\n")
        self._file.flush()
        self._digest.update(text.encode() + b"\n")
        means = {name: metric["mean"] for name, metric in values.get("metrics", {}).items()}
        numbers = {
            f"{arm}/{kind}/{name}": value
            for name, value in {**values, **means, **clocks}.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in PLACES
        }
        self._log_numbers(numbers, values.get("step", values.get("iteration", self._lines[arm, kind])))
        self._lines[arm, kind] += 1
        if self._watch is not None:
            self._watch(kind, {**values, **clocks})

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, without those between a process that was killed and the next."""
        return time.monotonic() - self._start

    @property
    def size(self) -> int:
        """Bytes that are safely on the disk now."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    @property
    def mark(self) -> dict[str, Any]:
        """The end of the file now, for ``cut``: "metrics_bytes", "metrics_checksum" of all before, and "phases", the
        seconds that no line has yet."""
        checksum = self._digest.hexdigest()
        return {"metrics_bytes": self.size, "metrics_checksum": checksum, "phases": self._pending()}

    def cut(self, mark: Mapping[str, Any]) -> None:
        """Cuts the file to where it ended at a ``mark``: what came later will be logged again.

        Raises UserError where the file is shorter, no line ends there, or what is before is not what was logged.
        """
        path, size = Path(self._file.name), mark["metrics_bytes"]
        try:
            kept = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {RESTORE}") from error
        if len(kept) < size or (size and kept[size - 1 : size] != b"\n"):
            raise UserError(
                f"{path} has {len(kept)} bytes, but a checkpoint knows lines up to byte {size}: it was changed; "
                f"{RESTORE}"
            )
        lines = []
        for number, line in enumerate(kept[:size].splitlines(), start=1):
            try:
                lines.append(json.loads(line))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{path}:{number}: is damaged ({error}); {RESTORE}") from error
        self._digest = xxhash.xxh3_128(kept[:size])
        if mark.get("metrics_checksum") not in (None, self._digest.hexdigest()):  # None: of an earlier version
            raise UserError(f"{path} is damaged: its first {size} bytes are not those that were written; {RESTORE}")
        self._file.truncate(size)
        self._lines = Counter((line["arm"], line["kind"]) for line in lines)
        self._start = time.monotonic() - max((line["time"]["elapsed_s"] for line in lines), default=0.0)
