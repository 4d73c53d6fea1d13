"""The process that ``WorkerPool`` starts: it forks workers, gives each one task at a time, kills those above a limit.

It and its workers end when the trainer closes the connection.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from nemo_edo.rewards import equivalence
from nemo_edo.rewards.workers import Limits, TaskFailure

_FUNCTIONS = {function.__name__: function for function in (equivalence.compare, equivalence.parses)}
_REPLACE_ABOVE = 0.5
"""Share of the memory limit: a worker whose peak was above it is replaced, as its next task would have less."""
_FIRST_TRY_S = 0.25
"""CPU time of a task's first try where there is a budget: few need more, and those wait until the others are done."""
_PATIENCE = 20
"""Times its CPU time that a task may take of the wall clock: a busy machine must not cost an answer its reward."""


@dataclass
class Worker:
    pid: int
    connection: Connection
    task: int | None = None
    """Index of its current task."""
    values: tuple = ()
    """The task's arguments."""
    begun: tuple[float, float] = 0.0, 0.0
    """The wall clock, and its CPU seconds, when it got the task."""
    deadline: float = 0.0
    """Of the wall clock: it cannot have used up its CPU time before."""

    def begin(self, task: int, values: tuple, seconds: float) -> None:
        self.task, self.values, self.begun = task, values, (time.monotonic(), self._cpu_seconds())
        self.deadline = self.begun[0] + seconds

    def is_late(self, seconds: float) -> bool:
        """Whether its task has used up so many CPU seconds; otherwise the deadline is put off."""
        now, (wall, cpu) = time.monotonic(), self.begun
        if now < self.deadline:
            return False
        left = min(seconds - (self._cpu_seconds() - cpu), wall + _PATIENCE * seconds - now)
        self.deadline = now + left
        return left <= 0

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


class Server:
    def __init__(self, trainer: Connection, limits: Limits) -> None:
        self._trainer = trainer
        self._limits = limits
        self._budget_s = limits.budget_s
        """What is left of it."""
        self._workers: list[Worker] = []
        for _ in range(limits.workers):
            self._workers.append(self._fork())

    def serve(self) -> None:
        while True:
            try:
                results = self._run(*self._trainer.recv())
                if results is None:
                    break
                self._trainer.send((results, self._budget_s))
            except (EOFError, ConnectionError):
                break
        for worker in self._workers:
            worker.end()

    def _run(self, name: str, arguments: list[tuple], budget_s: float) -> list[Any] | None:
        """The results in order, within a budget; None where the trainer has closed the connection."""
        results: list[Any] = [None] * len(arguments)
        tasks, limits = range(len(arguments)), self._limits
        tries = [limits.seconds]
        if math.isfinite(budget_s):
            tries.insert(0, min(_FIRST_TRY_S, limits.seconds))
        for seconds in tries:
            self._budget_s = budget_s if seconds == tries[-1] else math.inf
            waiting = deque((task, arguments[task]) for task in tasks if self._budget_s > 0)
            if not self._try(name, waiting, results, seconds):
                return None
            tasks = [task for task in tasks if results[task] is TaskFailure.TIMED_OUT]
        return results

    def _try(self, name: str, waiting: deque[tuple[int, tuple]], results: list[Any], seconds: float) -> bool:
        """Gives each task at most so many CPU seconds, until those that took them have used up the budget; the others
        have timed out, too. False where the trainer has closed the connection."""
        while waiting or any(worker.task is not None for worker in self._workers):
            for worker in [worker for worker in self._workers if worker.task is None]:
                self._give(worker, name, waiting, seconds)
            busy = [worker for worker in self._workers if worker.task is not None]
            timeout = max(0.0, min((worker.deadline for worker in busy), default=0.0) - time.monotonic())
            ready = wait([self._trainer, *(worker.connection for worker in busy)], timeout)
            if self._trainer in ready:
                return False
            for worker in busy:
                if worker.connection in ready:
                    self._take(worker, waiting, results)
                elif worker.is_late(seconds):
                    results[worker.task] = TaskFailure.TIMED_OUT
                    self._budget_s -= seconds
                    self._replace(worker)
            if self._budget_s <= 0:
                waiting.clear()
        return True

    def _give(self, worker: Worker, name: str, waiting: deque[tuple[int, tuple]], seconds: float) -> None:
        if not waiting:
            return
        task, values = waiting[0]
        try:
            worker.connection.send((name, values))
        except ConnectionError:  # it was killed while idle: the next round uses its replacement
            self._replace(worker)
            return
        waiting.popleft()
        worker.begin(task, values, seconds)

    def _take(self, worker: Worker, waiting: deque[tuple[int, tuple]], results: list[Any]) -> None:
        """A task whose worker died is tried once more: the system may have killed it, short of memory; that must not
        cost an answer its reward."""
        try:
            results[worker.task], is_worn = worker.connection.recv()
        except (EOFError, ConnectionError):
            if results[worker.task] is not TaskFailure.CRASHED:
                waiting.append((worker.task, worker.values))
            results[worker.task], is_worn = TaskFailure.CRASHED, True
        worker.task = None
        if is_worn:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._fork()

    def _fork(self) -> Worker:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            # Copies of the other connections would keep them open after their processes have ended.
            for connection in [ours, self._trainer, *(worker.connection for worker in self._workers)]:
                connection.close()
            _work(theirs, self._limits)
        theirs.close()
        return Worker(pid, ours)


def _work(server: Connection, limits: Limits) -> None:
    """A worker's loop; does not return."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what sympy prints about invalid input
    memory = limits.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    try:
        while True:
            name, arguments = server.recv()
            _limit_cpu(limits.seconds)
            result = _result(name, arguments)
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            server.send((result, peak_kb * 1024 > _REPLACE_ABOVE * memory))
    except EOFError:
        status = 0
    finally:
        os._exit(status)  # skip the server's clean-up


def _result(name: str, arguments: tuple) -> Any:
    try:
        return _FUNCTIONS[name](*arguments)
    except MemoryError:
        return TaskFailure.OUT_OF_MEMORY
    except Exception:  # invalid input makes sympy raise any type; it must cost one answer, not the run
        return TaskFailure.CRASHED


def _limit_cpu(seconds: float) -> None:
    """Ends a worker in an endless computation even if the server was killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    trainer, seconds, memory_mb, workers, budget_s = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer still scores its last responses before it stops
        signal.signal(number, signal.SIG_IGN)
    equivalence.warm_up()
    Server(Connection(int(trainer)), Limits(float(seconds), int(memory_mb), int(workers), float(budget_s))).serve()


if __name__ == "__main__":
    main()
