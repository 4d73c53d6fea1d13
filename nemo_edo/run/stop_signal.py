"""The first signal asks a run to stop after its step, the second ends it."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO

from nemo_edo.errors import RunStopped
from nemo_edo.interfaces import PartWatch
from nemo_edo.run.control import STALLED, stop_is_asked, tell_outcome
from nemo_edo.worker import dispatch

ONE_REQUEST_S = 1.0
"""Signals that follow the first within this time belong to it: Slurm and GNU timeout signal whole groups, and torchrun
hands on what it gets."""
ONE_CTRL_C_S = 0.25
"""The same of two Ctrl-C without torchrun: the second is a person's."""
STOPPING = "stopping after this step, to save it"


class StopSignal(PartWatch):
    """Inside the block, neither SIGTERM (from a scheduler whose allocation ends) nor Ctrl-C ends the process: it is
    remembered. A second one ends it at once. A job of ``nemo-edo launch`` may ask by a file, too. Asking whether to
    stop is a sign of life for ``watch``."""

    def __init__(self, watch: StallWatch | None = None) -> None:
        self._received = False
        self._watch = watch

    def __enter__(self) -> StopSignal:
        self._earlier = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._receive)}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup, for example, has it ignored
            self._earlier[signal.SIGINT] = signal.signal(signal.SIGINT, self._receive)
        self._process = os.getpid()
        # The interpreter writes each signal's number into a socket as it comes, for a thread to read: the main thread
        # may wait for another rank, and then runs no handler.
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._earlier_socket = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # signals to a checkpoint's writer
        threading.Thread(target=self._end_at_the_second, daemon=True, name="signals").start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._earlier_socket)
        self._writing.close()  # which ends the thread
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        if self._watch is not None:
            self._watch.close()

    def _receive(self, number: int, _: object) -> None:
        # A checkpoint's writer, forked from this process, gets it as well: it says nothing, and writes to the end.
        mine = os.getpid() == self._process
        if mine and not self._received:
            # A handler must not wait for a lock, so it does not print. On a terminal: in place of the run's line, which
            # replaces it.
            said = (
                f"\r\x1b[2K{STOPPING}; Ctrl-C again ends at once"
                if os.isatty(2)
                else f"nemo-edo: {signal.Signals(number).name}: {STOPPING}; a second signal ends at once\n"
            )
            os.write(2, said.encode())
        self._received = True

    def is_asked(self) -> bool:
        """Whether this process or another rank has received the signal, or the job asks by its file."""
        self.alive()
        return self.was_asked

    def alive(self) -> None:
        if self._watch is not None:
            self._watch.beat()

    def begin_part(self) -> None:
        self.alive()
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        if self.was_asked:
            raise RunStopped("stopped, with all finished responses saved")

    @property
    def was_asked(self) -> bool:
        """Whether a stop was asked for; unlike ``is_asked`` this is no sign of life."""
        workers = dispatch.met()
        return self._received or (workers is not None and workers.asked_to_stop) or stop_is_asked()

    def _end_at_the_second(self) -> None:
        first = None
        with self._reading:
            while number := self._reading.recv(1):
                if number[0] not in (signal.SIGTERM, signal.SIGINT):
                    continue
                now = time.monotonic()
                first = first or (number[0], now)
                by_hand = {first[0], number[0]} == {signal.SIGINT} and "TORCHELASTIC_RUN_ID" not in os.environ
                if now - first[1] > (ONE_CTRL_C_S if by_hand else ONE_REQUEST_S):
                    os.write(2, b"\nnemo-edo: ended at once by a second signal; the same command resumes the run\n")
                    os._exit(128 + number[0])


STATUS = os.EX_TEMPFAIL
GRACE_S = 10.0
"""Seconds between the controller's stacks and its end: the other ranks write theirs meanwhile."""


class StallWatch:
    """Armed by the first ``beat``; each later one is a sign of life. Two beats ``limit_s`` apart end the process.

    The stacks are written by a thread of faulthandler's, which needs no lock that a stuck thread may hold.
    """

    def __init__(self, limit_s: float, folder: Path) -> None:
        """folder: gets ``stacks_rank_0.txt``; the other ranks write theirs when they are asked."""
        self._limit_s = limit_s
        self._path = folder / "stacks_rank_0.txt"
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
                silent = "" if (workers := dispatch.met()) is None else workers.waited_for()
                print(
                    f"nemo-edo: no progress for {self._limit_s:g} s (cluster.stalled_after_s)"
                    f"{f' ({silent})' if silent else ''}; stacks are in {self._path}",
                    file=sys.stderr,
                    flush=True,
                )
                tell_outcome(STALLED)
                os._exit(STATUS)
            if over > 0 and asked_at != last:
                asked_at = last
                if (workers := dispatch.met()) is not None:
                    workers.write_stacks(self._path.parent)
            time.sleep(min(1.0, -over if over < 0 else GRACE_S - over))
