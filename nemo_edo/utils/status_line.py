"""Lines at the bottom of a terminal that change during the work. Without a terminal they do not exist."""

from __future__ import annotations

import sys
import time
from functools import cache

from rich.console import Console
from rich.live import Live
from rich.text import Text

REDRAWN_EVERY_S = 0.2  # drawing takes about a millisecond: a loop of short steps must not pay for each of them
COUNTED_AFTER_S = 2.0  # shorter work is not counted on the terminal


@cache
def _console() -> Console:
    """The console of all lines, made with the first one, because it looks at standard output once."""
    return Console()


class StatusLine:
    """One line that is replaced by the next. What is printed meanwhile appears above it; lines of work within other
    work appear below each other."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._drawn = -REDRAWN_EVERY_S

    @property
    def is_possible(self) -> bool:
        """Whether standard output is a terminal that can draw over a line."""
        return sys.stdout.isatty() and _console().is_interactive

    @property
    def is_due(self) -> bool:
        """Whether it is possible, and the last text is not too recent."""
        return time.monotonic() - self._drawn >= REDRAWN_EVERY_S and self.is_possible

    def show(self, text: str) -> None:
        if self._live is None:
            self._live = Live(console=_console(), auto_refresh=False, transient=True)
            self._live.start()
            _console().show_cursor()  # a process that is killed leaves it as it is
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        self._drawn = time.monotonic()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class Counter:
    """How much of some work is done, as ``generate 320/640``; use as a context manager."""

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self._what, self._total, self._shown = what, total, shown
        self._done, self._begun, self._line = 0, time.monotonic(), StatusLine()

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_) -> None:
        self._line.close()

    def add(self, number: int = 1) -> None:
        self._done += number
        if self._shown and time.monotonic() - self._begun >= COUNTED_AFTER_S and self._line.is_due:
            self._line.show(f"{self._what} {self._done}/{self._total}")
