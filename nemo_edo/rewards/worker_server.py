"""The process behind ``WorkerPool``: forks workers, hands each one task at a time, kills those that exceed a limit.

It ends, and its workers with it, when the connection to the trainer does.
"""

from __future__ import annotations

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

from nemo_edo.rewards import equivalence
from nemo_edo.rewards.workers import Ended, Limits

_FUNCTIONS = {function.__name__: function for function in (equivalence.compare, equivalence.parses)}
_WORN_SHARE = 0.5
"""Of the memory limit: a worker whose peak was above it is replaced, for its next task would start with less."""


@dataclass
class Worker:
    pid: int
    connection: Connection
    task: int | None = None
    """Position of the task that it works on."""
    deadline: float = 0.0

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


class Server:
    def __init__(self, trainer: Connection, limits: Limits) -> None:
        self._trainer = trainer
        self._limits = limits
        self._workers: list[Worker] = []
        for _ in range(limits.workers):
            self._workers.append(self._fork())

    def serve(self) -> None:
        while True:
            try:
                results = self._run(*self._trainer.recv())
                if results is None:
                    break
                self._trainer.send(results)
            except (EOFError, ConnectionError):
                break
        for worker in self._workers:
            worker.end()

    def _run(self, name: str, arguments: list[tuple]) -> list[Any] | None:
        """The results in order; None where the trainer has gone meanwhile."""
        results: list[Any] = [None] * len(arguments)
        waiting = deque(enumerate(arguments))
        while waiting or any(worker.task is not None for worker in self._workers):
            for worker in [worker for worker in self._workers if worker.task is None]:
                self._give(worker, name, waiting)
            busy = [worker for worker in self._workers if worker.task is not None]
            patience = max(0.0, min((worker.deadline for worker in busy), default=0.0) - time.monotonic())
            ready = wait([self._trainer, *(worker.connection for worker in busy)], patience)
            if self._trainer in ready:
                return None
            for worker in busy:
                if worker.connection in ready:
                    self._take(worker, results)
                elif time.monotonic() >= worker.deadline:
                    results[worker.task] = Ended.TIMED_OUT
                    self._replace(worker)
        return results

    def _give(self, worker: Worker, name: str, waiting: deque[tuple[int, tuple]]) -> None:
        if not waiting:
            return
        task, values = waiting[0]
        try:
            worker.connection.send((name, values))
        except ConnectionError:  # it was killed while it had nothing to do: the next round asks its successor
            self._replace(worker)
            return
        waiting.popleft()
        worker.task, worker.deadline = task, time.monotonic() + self._limits.seconds

    def _take(self, worker: Worker, results: list[Any]) -> None:
        try:
            results[worker.task], worn = worker.connection.recv()
        except (EOFError, ConnectionError):
            results[worker.task], worn = Ended.CRASHED, True
        worker.task = None
        if worn:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._fork()

    def _fork(self) -> Worker:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            # Copies of the others' connections would keep them open when their processes have ended.
            for connection in [ours, self._trainer, *(worker.connection for worker in self._workers)]:
                connection.close()
            _work(theirs, self._limits)
        theirs.close()
        return Worker(pid, ours)


def _work(server: Connection, limits: Limits) -> None:
    """A worker's life; does not return."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what sympy says about hostile input
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
            server.send((result, peak_kb * 1024 > _WORN_SHARE * memory))
    except EOFError:
        status = 0
    finally:
        os._exit(status)  # not the server's clean-up


def _result(name: str, arguments: tuple) -> Any:
    try:
        return _FUNCTIONS[name](*arguments)
    except MemoryError:
        return Ended.OUT_OF_MEMORY
    except Exception:  # sympy raises what it likes on nonsense, and an answer must not end the run
        return Ended.CRASHED


def _limit_cpu(seconds: float) -> None:
    """Should the server be killed, a worker in an endless computation ends too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    trainer, seconds, memory_mb, workers = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer still scores what it has drawn before it stops
        signal.signal(number, signal.SIG_IGN)
    equivalence.warm_up()
    Server(Connection(int(trainer)), Limits(float(seconds), int(memory_mb), int(workers))).serve()


if __name__ == "__main__":
    main()
