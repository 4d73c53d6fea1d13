"""Worker processes with a time and a memory limit for each task: verification can hang or exhaust the memory.

A separate server process imports what the tasks need and forks the workers, so that a killed worker is replaced within
milliseconds, and the trainer (CUDA, threads, gigabytes) is never forked.

    trainer -- WorkerPool.run --> server -- one task at a time --> workers
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from nemo_edo.errors import UserError


class TaskFailure(Enum):
    """Why a task has no result."""

    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "ran out of memory"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Limits:
    seconds: float
    """CPU time of one task, which on an idle machine is its wall time."""
    memory_mb: int
    """Address space of one worker in MiB, including its libraries (about 70)."""
    workers: int
    budget_s: float = math.inf
    """Seconds that tasks which reach their limit may take of all workers, from one ``WorkerPool.begin`` to the next.
    Those that are left then have timed out; none that a quarter of a second is enough for is among them."""


class WorkerPool:
    """Runs functions of ``nemo_edo.rewards.equivalence`` in workers that are killed when they exceed a limit."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._connection: Connection | None = None
        self._left_s = limits.budget_s

    def begin(self, timed_out: int = 0) -> None:
        """The budget is whole again, but for tasks that have timed out before."""
        self._left_s = self.limits.budget_s - timed_out * self.limits.seconds

    def run(self, task: str, arguments: Sequence[tuple]) -> list[Any]:
        """The function's result, or the TaskFailure, for each tuple of arguments, in order.

        Raises UserError where the server process has died: the system may have killed it, short of memory.
        """
        if not arguments:
            return []
        if self._connection is None:
            self._start()
        try:
            self._connection.send((task, list(arguments), self._left_s))
            results, self._left_s = self._connection.recv()
        except (EOFError, OSError) as error:
            status = self._server.wait()
            self.close()
            raise UserError(
                f"the process that verifies answers has ended (exit status {status}); what was generated before stays: "
                "rerun the command to resume"
            ) from error
        return results

    def close(self) -> None:
        """Ends the server and the workers; also done when the pool is garbage-collected."""
        if self._connection is not None:
            self._finalizer()
            self._connection = None

    def _start(self) -> None:
        """Starts the server with the first task: most ranks of a run never need it."""
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "nemo_edo.rewards.worker_server", str(theirs.fileno())]
        settings = [str(value) for value in astuple(self.limits)]
        # A separate session: only the trainer handles Ctrl-C.
        self._server = subprocess.Popen(
            [*command, *settings], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()
        self._finalizer = weakref.finalize(self, _close, self._connection, self._server)


def _close(connection: Connection, server: subprocess.Popen) -> None:
    connection.close()  # ends the server
    server.wait()
