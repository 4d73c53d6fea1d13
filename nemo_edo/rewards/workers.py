"""Worker processes for what must not stop or slow down a run: answers that hang a verifier, and users' functions.

A server process forks the workers, so that one that was killed is replaced within milliseconds, and the trainer (CUDA,
threads, gigabytes) is never forked.

    trainer -- WorkerPool.run --> server (worker_server.py) -- one task at a time --> workers
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from nemo_edo.errors import UserError


@dataclass(frozen=True)
class TaskFailure:
    """Why a task has no result."""

    reason: str
    exit_status: int | None = None
    """The exit status of its worker, which has ended by itself; negative: a signal's number."""


TIMED_OUT, OUT_OF_MEMORY, CRASHED = map(TaskFailure, ("timed out", "ran out of memory", "crashed"))


@dataclass(frozen=True)
class Limits:
    """What untrusted tasks may take."""

    seconds: float
    """CPU time of one task, which on an idle machine is its wall time."""
    memory_mb: int
    """Address space of one worker in MiB, including its libraries (about 70)."""
    workers: int
    budget_s: float = math.inf
    """Seconds that tasks which reach their limit may take of all workers, from one ``WorkerPool.begin`` to the next.
    Those that are left then have timed out; none that a quarter of a second is enough for is among them."""


class WorkerPool:
    """Calls functions in workers, which are killed when they exceed a limit.

    limits: None: one worker for trusted functions, whose tasks have only the limit that ``run`` is given. prepare: the
    import path of a function that the server calls before it forks.
    """

    def __init__(self, limits: Limits | None, prepare: str | None = None) -> None:
        self.limits = limits
        self._prepare = prepare
        self._connection: Connection | None = None
        self._left_s = math.inf if limits is None else limits.budget_s

    def begin(self, timed_out: int = 0) -> None:
        """The budget is whole again, but for tasks that have timed out before."""
        self._left_s = self.limits.budget_s - timed_out * self.limits.seconds

    def run(self, function: str, arguments: Sequence[tuple], wall_s: float = math.inf) -> list[Any]:
        """What the function of an import path returns, or the TaskFailure, for each tuple of arguments, in order.

        wall_s: wall time of each task. Raises UserError where the server has died: the system may have killed it, short
        of memory.
        """
        if not arguments:
            return []
        if self._connection is None:
            self._start()
        try:
            self._connection.send((function, list(arguments), wall_s, self._left_s))
            results, self._left_s = self._connection.recv()
        except (EOFError, OSError) as error:
            status = self._server.wait()
            self.close()
            raise UserError(
                f"the process that scores answers has ended (exit status {status}); what was generated before stays: "
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
        main = "from nemo_edo.rewards.worker_server import main; main()"  # not -m: it sends instances of our classes
        # OpenBLAS would reserve address space for each of its threads.
        threads = {} if self.limits is None else {"OMP_NUM_THREADS": "1"}
        # A separate session: only the trainer handles Ctrl-C.
        self._server = subprocess.Popen(
            [sys.executable, "-c", main, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **threads},
        )  # fmt: skip
        theirs.close()
        self._finalizer = weakref.finalize(self, _close, self._connection, self._server)
        self._connection.send((self.limits, self._prepare))


def _close(connection: Connection, server: subprocess.Popen) -> None:
    connection.close()  # ends the server and the workers
    server.wait()
