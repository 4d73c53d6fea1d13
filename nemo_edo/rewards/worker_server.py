"""The process that ``WorkerPool`` starts: it forks workers, gives each one task at a time, and replaces those that end.

All of them end when the trainer closes the connection or has ended. It imports neither torch nor the trainer.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pkgutil import resolve_name
from typing import Any

from nemo_edo.rewards.workers import CRASHED, OUT_OF_MEMORY, TIMED_OUT, Limits, TaskFailure

_REPLACE_ABOVE = 0.5
"""Share of the memory limit: a worker whose peak was above it is replaced, as its next task would have less."""
_FIRST_TRY_S = 0.25
"""CPU time of a task's first try where there is a budget: few need more, and those wait until the others are done."""


@dataclass
class Worker:
    pid: int
    connection: Connection
    task: int | None = None
    """Index of its current task."""
    deadline: float = math.inf

    def end(self) -> int:
        """Kills the process where it has not ended, and what its functions have started; its exit status."""
        os.killpg(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.connection.close()
        return status


class Server:
    def __init__(self, trainer: Connection, limits: Limits | None) -> None:
        self._trainer = trainer
        self._limits = limits
        self._workers: list[Worker] = []
        for _ in range(1 if limits is None else limits.workers):
            self._workers.append(self._fork())

    def run(self, function: str, arguments: Sequence[tuple], wall_s: float, budget_s: float) -> tuple[list, float]:
        """The results in order, and what is left of the budget. Raises EOFError where the trainer has ended."""
        seconds = 0.0 if self._limits is None else self._limits.seconds  # 0: no limit
        first = [min(_FIRST_TRY_S, seconds)] if math.isfinite(budget_s) else []
        results: list[Any] = [TIMED_OUT] * len(arguments)
        for cpu_s in first:
            self._try(function, arguments, results, cpu_s, wall_s, math.inf)
        return results, self._try(function, arguments, results, seconds, wall_s, budget_s)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _try(
        self,
        function: str,
        arguments: Sequence[tuple],
        results: list[Any],
        cpu_s: float,
        wall_s: float,
        budget_s: float,
    ) -> float:
        """Gives each task without a result at most so many seconds, until those that took them have used up the budget.
        Returns what is left of it."""
        waiting = deque(task for task, result in enumerate(results) if result is TIMED_OUT)
        while True:
            for worker in self._workers:
                if worker.task is None and waiting and budget_s > 0:
                    worker.task, worker.deadline = waiting.popleft(), time.monotonic() + wall_s
                    with contextlib.suppress(ConnectionError):  # it has ended, which ``_take`` finds
                        worker.connection.send((function, arguments[worker.task], cpu_s))
            busy = [worker for worker in self._workers if worker.task is not None]
            if not busy:
                return budget_s
            left = min(worker.deadline for worker in busy) - time.monotonic()
            connections = [self._trainer, *(worker.connection for worker in busy)]
            ready = wait(connections, None if left == math.inf else max(0.0, left))
            if self._trainer in ready:
                raise EOFError
            for worker in busy:
                if worker.connection in ready or time.monotonic() >= worker.deadline:
                    task, result = worker.task, self._take(worker, is_late=worker.connection not in ready)
                    results[task] = result
                    budget_s -= cpu_s if result is TIMED_OUT else 0

    def _take(self, worker: Worker, *, is_late: bool) -> Any:
        """The result of a worker's task. Replaces a worker that has ended, or is late."""
        result, is_worn = TIMED_OUT, True
        if not is_late:
            try:
                result, is_worn = worker.connection.recv()
            except (EOFError, ConnectionError):
                result = None
        worker.task = None
        if is_worn:
            status = worker.end()
            self._workers[self._workers.index(worker)] = self._fork()
            if result is None:
                result = TIMED_OUT if status == -signal.SIGPROF else TaskFailure("ended its process", status)
        return TIMED_OUT if result == TIMED_OUT else result

    def _fork(self) -> Worker:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            # Copies of the other connections would keep them open after their processes have ended.
            for connection in [ours, self._trainer, *(worker.connection for worker in self._workers)]:
                connection.close()
            _work(theirs, self._limits)
        os.setpgid(pid, pid)
        theirs.close()
        return Worker(pid, ours)


def _work(server: Connection, limits: Limits | None) -> None:
    """A worker's loop; does not return."""
    memory = math.inf
    if limits is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what sympy prints about invalid input
        memory = limits.memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    try:
        while True:
            function, arguments, cpu_s = server.recv()
            # The signal ends the process, whatever it computes: SIGPROF's handler is the default one.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            result = _result(function, arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            server.send((result, peak_kb * 1024 > _REPLACE_ABOVE * memory))
    except EOFError:
        status = 0
    finally:
        os._exit(status)  # skip the server's clean-up


def _result(function: str, arguments: tuple) -> Any:
    try:
        return resolve_name(function)(*arguments)
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception:  # invalid input makes sympy raise any type; it must cost one answer, not the run
        return CRASHED


def main() -> None:
    trainer = Connection(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer still scores its last responses before it stops
        signal.signal(number, signal.SIG_IGN)
    limits, prepare = trainer.recv()
    if prepare is not None:
        resolve_name(prepare)()
    server = Server(trainer, limits)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            trainer.send(server.run(*trainer.recv()))
    server.close()
