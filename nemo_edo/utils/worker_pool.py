"""Worker processes for what must not stop or slow a run: answers that hang a verifier, templates, users' functions.

A server process forks the workers, so that one that was killed is replaced within milliseconds, and the trainer (CUDA,
threads, gigabytes) is never forked.

    trainer -- WorkerPool.run --> server -- one task at a time --> workers

Server and workers import neither torch nor the trainer, and end when the trainer closes the connection or has ended.
"""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pkgutil import resolve_name
from typing import Any

from nemo_edo.errors import UserError

_REPLACE_ABOVE = 0.5  # of the memory limit: a worker with a higher peak is replaced, as its next task has less
_FIRST_TRY_S = 0.25  # CPU time of a first try where there is a budget: few need more, and those wait


@dataclass(frozen=True)
class TaskFailure:
    """Why a task has no result."""

    reason: str
    exit_status: int | None = None  # of its worker, which has ended by itself; negative: a signal's number


TIMED_OUT, OUT_OF_MEMORY, CRASHED = map(TaskFailure, ("timed out", "ran out of memory", "crashed"))


@dataclass(frozen=True)
class Limits:
    """What untrusted tasks may take."""

    seconds: float  # CPU time of one task, which on an idle machine is its wall time
    memory_mb: int  # address space of one worker in MiB, including its libraries (about 70)
    workers: int
    budget_s: float = math.inf
    """Seconds that tasks which reach their limit may take of all workers, from one ``WorkerPool.begin`` to the next.
    Those that are left then have timed out; none that a quarter of a second is enough for is among them."""


class WorkerPool:
    """Calls functions in workers, which are killed when they exceed a limit. limits: None: one worker for trusted
    functions, with the limit that ``run`` is given. prepare: import path of what the server calls before it forks."""

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
        wall_s: wall time of each task. Raises UserError where the server has died, perhaps killed for memory."""
        if not arguments:
            return []
        if self._connection is None:  # most runs never need it
            self._start()
        try:
            self._connection.send((function, list(arguments), wall_s, self._left_s))
            results, self._left_s = self._connection.recv()
        except (EOFError, OSError) as error:
            status = self._server.wait()
            self.close()
            raise UserError(
                f"the process that scores answers or renders prompts has ended (exit status {status}); what was "
                "generated before stays: rerun the command to resume"
            ) from error
        return results

    def close(self) -> None:
        """Ends the server and the workers; also done when the pool is garbage-collected."""
        if self._connection is not None:
            self._finalizer()
            self._connection = None

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        main = "from nemo_edo.utils.worker_pool import main; main()"  # not -m: it sends instances of our classes
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


# --- in the server ----------------------------------------------------------------------------------------------------


def main() -> None:
    trainer = Connection(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer still scores its last responses before it stops
        signal.signal(number, signal.SIG_IGN)
    limits, prepare = trainer.recv()
    if prepare is not None:
        resolve_name(prepare)()
    server = _ServerProcess(trainer, limits)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            trainer.send(server.run(*trainer.recv()))
    for worker in server.workers:
        worker.end()


@dataclass
class _Worker:
    pid: int
    connection: Connection
    task: int | None = None  # index of its current task
    deadline: float = math.inf

    def end(self) -> int:
        """Kills the process where it has not ended, and what its functions have started; its exit status."""
        os.killpg(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.connection.close()
        return status


class _ServerProcess:
    def __init__(self, trainer: Connection, limits: Limits | None) -> None:
        self._trainer = trainer
        self._limits = limits
        self.workers: list[_Worker] = []
        for _ in range(1 if limits is None else limits.workers):
            self.workers.append(self._fork())

    def run(self, function: str, arguments: Sequence[tuple], wall_s: float, budget_s: float) -> tuple[list, float]:
        """The results in order, and what is left of the budget: each task gets at most its limit, until those that
        reached it have used up the budget. Raises EOFError where the trainer has ended."""
        seconds = 0.0 if self._limits is None else self._limits.seconds  # 0: no limit
        results: list[Any] = [TIMED_OUT] * len(arguments)
        first = [(min(_FIRST_TRY_S, seconds), math.inf)] if math.isfinite(budget_s) else []
        for cpu_s, left_s in [*first, (seconds, budget_s)]:
            waiting = deque(task for task, result in enumerate(results) if result is TIMED_OUT)
            while True:
                for worker in self.workers:
                    if worker.task is None and waiting and left_s > 0:
                        worker.task, worker.deadline = waiting.popleft(), time.monotonic() + wall_s
                        with contextlib.suppress(ConnectionError):  # it has ended, which ``_take`` finds
                            worker.connection.send((function, arguments[worker.task], cpu_s))
                busy = [worker for worker in self.workers if worker.task is not None]
                if not busy:
                    break
                until = min(worker.deadline for worker in busy) - time.monotonic()
                connections = [self._trainer, *(worker.connection for worker in busy)]
                ready = wait(connections, None if until == math.inf else max(0.0, until))
                if self._trainer in ready:
                    raise EOFError
                for worker in busy:
                    if worker.connection in ready or time.monotonic() >= worker.deadline:
                        task, result = worker.task, self._take(worker, is_late=worker.connection not in ready)
                        results[task] = result
                        left_s -= cpu_s if result is TIMED_OUT else 0
        return results, left_s

    def _take(self, worker: _Worker, *, is_late: bool) -> Any:
        """The result of a worker's task. Replaces a worker that has ended, is late, or uses much memory."""
        worker.task, answer = None, (TIMED_OUT, True) if is_late else None
        if not is_late:
            with contextlib.suppress(EOFError, ConnectionError):
                answer = worker.connection.recv()
        if answer is not None and not answer[1]:
            return answer[0]
        status = worker.end()
        self.workers[self.workers.index(worker)] = self._fork()
        if answer is not None:
            return answer[0]
        return TIMED_OUT if status == -signal.SIGPROF else TaskFailure("ended its process", status)

    def _fork(self) -> _Worker:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            # Copies of the other connections would keep them open after their processes have ended.
            for connection in [ours, self._trainer, *(worker.connection for worker in self.workers)]:
                connection.close()
            _work(theirs, self._limits)
        os.setpgid(pid, pid)
        theirs.close()
        return _Worker(pid, ours)


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
            try:
                result = resolve_name(function)(*arguments)
            except MemoryError:
                result = OUT_OF_MEMORY
            except Exception:  # invalid input makes sympy raise any type; it must cost one answer, not the run
                result = CRASHED
            signal.setitimer(signal.ITIMER_PROF, 0)
            peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            server.send((result, peak_kb * 1024 > _REPLACE_ABOVE * memory))
    except EOFError:
        status = 0
    finally:
        os._exit(status)  # skip the server's clean-up
