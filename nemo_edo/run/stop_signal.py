"""The first signal asks a run to stop after its step, the second ends it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

from nemo_edo.run.control import stop_is_asked
from nemo_edo.run.stall import StallWatch
from nemo_edo.worker import dispatch

ONE_REQUEST_S = 1.0
"""Signals that follow the first within this time belong to it: Slurm and GNU timeout signal whole groups, and torchrun
hands on what it gets."""
ONE_CTRL_C_S = 0.25
"""The same of two Ctrl-C without torchrun: the second is a person's."""
STOPPING = "stopping after this step, to save it"


class StopSignal:
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
        # By torchrun's variable: the signal may come before the process group is there, or after it. A checkpoint's
        # writer, forked from this process, gets it as well: it says nothing, and writes to the end.
        mine = os.getpid() == self._process and os.environ.get("RANK", "0") == "0"
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
        """A sign of life for the watch, from any thread."""
        if self._watch is not None:
            self._watch.beat()

    @property
    def was_asked(self) -> bool:
        """As ``is_asked``; no sign of life."""
        return self._received or dispatch.asked_to_stop() or stop_is_asked()

    def _end_at_the_second(self) -> None:
        """Ends the process at its second signal to stop."""
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
