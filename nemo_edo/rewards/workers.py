"""Worker processes for work that may hang or exhaust the memory: each task has a limit of both.

A server process of its own imports what the tasks need and forks the workers, so that a worker that was killed is
replaced in milliseconds, and the trainer (CUDA, threads, gigabytes) is never forked.

    trainer -- WorkerPool.run --> server -- one task at a time --> workers
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


class Ended(Enum):
    """How a task ended that has no result."""

    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "ran out of memory"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Limits:
    seconds: float
    """Wall time of one task."""
    memory_mb: int
    """Address space of one worker, in MiB, its libraries (about 70) included."""
    workers: int


class WorkerPool:
    """Runs functions of ``nemo_edo.rewards.equivalence`` in workers that are killed where they exceed their limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._connection: Connection | None = None

    def run(self, task: str, arguments: Sequence[tuple]) -> list[Any]:
        """The function's result for each tuple of arguments, in order, or how the task Ended.

        Raises RuntimeError where the server itself has died.
        """
        if not arguments:
            return []
        if self._connection is None:
            self._start()
        try:
            self._connection.send((task, list(arguments)))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            status = self._server.poll()
            raise RuntimeError(f"the verification server has died (exit status {status}, its error above)") from error

    def close(self) -> None:
        """Ends the server and the workers. Also done when the pool is garbage."""
        if self._connection is not None:
            self._finalizer()

    def _start(self) -> None:
        """The server, at the first task: most ranks of a run have none."""
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "nemo_edo.rewards.worker_server", str(theirs.fileno())]
        settings = [str(self.limits.seconds), str(self.limits.memory_mb), str(self.limits.workers)]
        # A session of its own: Ctrl-C in the terminal is the trainer's to handle.
        self._server = subprocess.Popen(
            [*command, *settings], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()
        self._finalizer = weakref.finalize(self, _close, self._connection, self._server)


def _close(connection: Connection, server: subprocess.Popen) -> None:
    connection.close()  # what the server takes for its end
    server.wait()
