"""Ends a stalled run, and writes the stacks of each of its processes."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

from nemo_edo.run.control import OUTCOME, STALLED, control_folder
from nemo_edo.worker import dispatch

STATUS = os.EX_TEMPFAIL
GRACE_S = 10.0
"""Seconds between the controller's stacks and its end: the other ranks write theirs meanwhile."""


class StallWatch:
    """Armed by the first ``beat``; each later one is a sign of life. Two beats ``limit_s`` apart end the process.

    The stacks are written by a thread of faulthandler's, which needs no lock that a stuck thread may hold.
    """

    def __init__(self, limit_s: float, folder: Path) -> None:
        """folder: gets ``stacks_rank_N.txt``."""
        self._limit_s = limit_s
        self._path = folder / f"stacks_rank_{os.environ.get('RANK', '0')}.txt"
        self._last: float | None = None
        self._file: IO[str] | None = None

    def beat(self) -> None:
        now, begins = time.monotonic(), self._last is None
        if not begins and now < self._last + min(1.0, self._limit_s / 10):  # some beat at every token
            return
        self._last = now
        if begins:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
            threading.Thread(target=self._end_when_stalled, daemon=True, name="stall watch").start()
        faulthandler.dump_traceback_later(self._limit_s, file=self._file)

    def close(self) -> None:
        """Ends the watch: the process has other things to do."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._last = None
            self._file.close()
            self._file = None
            if not self._path.stat().st_size:
                self._path.unlink()

    def _end_when_stalled(self) -> None:
        asked_at = None
        while (last := self._last) is not None:
            over = time.monotonic() - last - self._limit_s
            if over > GRACE_S:
                self._end()
            if over > 0 and asked_at != last:
                asked_at = last
                dispatch.write_stacks(self._path.parent)
            time.sleep(min(1.0, -over if over < 0 else GRACE_S - over))

    def _end(self) -> None:
        silent = dispatch.waited_for()
        who = f" ({silent})" if silent else ""
        message = (
            f"nemo-edo: no progress for {self._limit_s:g} s (cluster.stalled_after_s){who}; stacks are in {self._path}"
        )
        print(message, file=sys.stderr, flush=True)
        folder = control_folder()
        if folder is not None:
            (folder / OUTCOME).write_text(STALLED + "\n", encoding="utf-8")
        os._exit(STATUS)
