"""The lines that show a grid's progress: one where a cell starts and one where it ends, with its last numbers and
the time left; on a terminal also the last line of each cell in progress."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nemo_edo.run.console import clock_time
from nemo_edo.utils.status_line import StatusLine

LAST_BYTES = 8192
"""Of a cell's log, in which its last line is looked for."""
LOOKED_AT_EVERY_S = 1.0
_OF_A_RUN = re.compile(r"^\[\d+/\d+\] .*", re.MULTILINE)
_OF_AN_EVALUATION = re.compile(r"^\[\d+/\d+\] (\S+) after \d+: (.*)", re.MULTILINE)


@dataclass
class GridConsole:
    """total: cells; finished: those that finished earlier; jobs: that run at a time."""

    total: int
    finished: int
    jobs: int
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _started: int = 0
    _running: dict[str, tuple[Path, float]] = field(default_factory=dict)
    """Cell -> its log, and when it started."""
    _durations: list[float] = field(default_factory=list)
    _line: StatusLine = field(default_factory=StatusLine)
    _looked: float = 0.0

    def __post_init__(self) -> None:
        if self.finished:
            self.say(f"{self.finished} of {self.total} runs finished earlier")

    def started(self, name: str, log: Path, donor: str | None) -> None:
        """donor: the cell whose warm-up it has."""
        self._started += 1
        self._running[name] = log, self.clock()
        shared = f", with the warm-up of {donor}" if donor else ""
        self.say(f"[{self.finished + self._started}/{self.total}] {name}{shared}: see {log}")

    def ended(self, name: str, status: int) -> None:
        log, begun = self._running.pop(name)
        self._durations.append(self.clock() - begun)
        outcome = f"failed with status {status}" if status else "finished"
        numbers = [f"{arm} {means}" for arm, means in dict(_OF_AN_EVALUATION.findall(_end_of(log))).items()]
        parts = [f"{name}: {outcome} after {self._durations[-1] / 60:.1f} min", *([] if status else numbers[-1:])]
        left = self.total - self.finished - len(self._durations)
        if left:
            mean = sum(self._durations) / len(self._durations)
            parts.append(f"{left} left, ~{clock_time(mean * left / min(self.jobs, left))}")
        self.say("; ".join(parts))

    def look(self) -> None:
        """Draws the last line of each cell in progress; often called, it looks once a second."""
        if self.clock() - self._looked < LOOKED_AT_EVERY_S or not self._line.is_possible:
            return
        self._looked = self.clock()
        last = {name: _OF_A_RUN.findall(_end_of(log)) for name, (log, _) in self._running.items()}
        self._line.show("\n".join(f"{name}: {(lines or ['starting'])[-1]}" for name, lines in last.items()))

    def close(self) -> None:
        self._line.close()


def _end_of(log: Path) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - LAST_BYTES, 0))
        return file.read().decode(errors="replace")
