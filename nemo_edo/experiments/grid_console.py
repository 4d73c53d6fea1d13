"""The lines that show a grid's progress: one where a cell starts and one where it ends, with its last numbers and
the time left; on a terminal also the last line of each cell in progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from nemo_edo.run.console import clock_time
from nemo_edo.utils.status_line import StatusLine

LAST_BYTES = 8192
"""The part of a cell's log in which its last line is looked for."""
LOOKED_AT_EVERY_S = 1.0
Clock = Callable[[], float]
_OF_A_RUN = re.compile(r"^\[\d+/\d+\] .*", re.MULTILINE)
_OF_AN_EVALUATION = re.compile(r"^\[\d+/\d+\] (\S+) after \d+: (.*)", re.MULTILINE)


class GridConsole:
    """The lines of a grid of ``total`` cells, ``jobs`` of them at a time, after those that finished earlier."""

    def __init__(
        self, total: int, finished: int, jobs: int, say: Callable[[str], None], clock: Clock = time.monotonic
    ) -> None:
        self.total, self.finished, self.jobs, self.say, self.clock = total, finished, jobs, say, clock
        self._running: dict[str, tuple[Path, float]] = {}  # cell -> its log, and when it started
        self._durations: list[float] = []
        self._line, self._looked = StatusLine(), 0.0
        if finished:
            say(f"{finished} of {total} runs finished earlier")

    def started(self, name: str, log: Path, donor: str | None) -> None:
        """donor: the cell whose warm-up it has."""
        self._running[name] = log, self.clock()
        shared = f", with the warm-up of {donor}" if donor else ""
        place = self.finished + len(self._durations) + len(self._running)
        self.say(f"[{place}/{self.total}] {name}{shared}: see {log}")

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
        file.seek(max(log.stat().st_size - LAST_BYTES, 0))
        return file.read().decode(errors="replace")
