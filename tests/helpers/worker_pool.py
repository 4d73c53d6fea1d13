"""Ranks of distributed tests, forked from processes that have imported everything: imports take longer than most cases.

A case is a function of a module, called with keyword arguments in a new process for each rank; these share a gloo
process group and end with the case. (In processes that lived on, the threads of every group that Megatron has made and
forgotten would go on polling.) A case that fails, or whose ranks die or hang, ends its pool's processes; the next case
starts new ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait

from helpers.ports import free_ports

from nemo_edo.utils.processes import end_with

MEETING_S = 300.0
LASTING = "WORKER_POOL_LASTS"
GRACE_S = 10.0
"""How long the others may take once a rank has failed: they may wait for it in a collective until the limit."""


class CaseFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message has the tracebacks and the last output."""


class WorkerPool:
    """``world_size`` ranks; use as a context manager. ``wait_s``: how long ranks wait for each other in a collective;
    None leaves torch's half hour. ``environment``: for the ranks, added to this process's. ``lasting``: a rank runs all
    cases itself, which saves each the first use of Megatron; they must leave it as they found it."""

    def __init__(
        self, world_size: int, *, wait_s: float | None = None, environment: Mapping[str, str] | None = None,
        lasting: bool = False,
    ) -> None:
        self.world_size, self._wait_s = world_size, wait_s
        self._environment = {**(environment or {}), **({LASTING: "1"} if lasting else {})}
        self._ranks: list[tuple[subprocess.Popen, Connection]] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    def run(self, case: str, *, limit_s: float = 500.0, **arguments) -> list:
        """What ``case``, "module:function", returns on each rank; raises CaseFailed."""
        if not self._ranks:
            self._start()
        self._output.seek(0, os.SEEK_END)
        begin = self._output.tell()
        port = free_ports(1)[0]
        for _, pipe in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is found below
                pipe.send_bytes(pickle.dumps((case, arguments, port)))
        results, failures = self._collect(limit_s)
        if failures:
            self._stop()
            self._output.seek(begin)
            said = "\n".join(f"rank {rank}: {why}" for rank, why in sorted(failures.items()))
            raise CaseFailed(f"{case}\n{said}\n--- output\n{self._output.read()[-6000:].decode(errors='replace')}")
        return [results[rank] for rank in range(self.world_size)]

    def _collect(self, limit_s: float) -> tuple[dict[int, object], dict[int, str]]:
        """Results and failures by rank."""
        results, failures = {}, {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        deadline = time.monotonic() + limit_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "no answer")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure, result = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    failure, result = f"died with status {self._ranks[rank][0].wait(GRACE_S)}", None
                if failure is None:
                    results[rank] = result
                else:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return results, failures

    def _start(self) -> None:
        self._output = tempfile.TemporaryFile("a+b")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
                       "WORLD_SIZE": str(self.world_size), **self._environment}
        for rank in range(self.world_size):
            ours, theirs = Pipe()
            command = [sys.executable, "-W", "ignore", "-m", "helpers.worker_pool", str(os.getpid()),
                       str(theirs.fileno()), *([] if self._wait_s is None else [str(self._wait_s)])]
            process = subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                       stdout=self._output, stderr=self._output, stdin=subprocess.DEVNULL,
                                       pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()
            self._ranks.append((process, ours))

    def _stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started, such as a checkpoint's writers
            process.wait()
        self._ranks.clear()


# --- in the processes ---------------------------------------------------------------------------------------------


def import_bridge() -> None:
    """Before a fork, what every case with a model would import anew, in two seconds; it adapts nothing else."""
    import torch

    from nemo_edo.megatron.cpu import without_cuda

    if not torch.cuda.device_count():  # which, unlike is_available, leaves CUDA to the forked processes
        without_cuda.import_bridge()


def serve(pipe: Connection, wait_s: float | None) -> None:
    """Forks a process for each case, or runs it, until the pool's process closes its end."""
    contexts, has_group = contextlib.ExitStack(), False
    while True:
        try:
            case, arguments, port = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if LASTING in os.environ:
            if not has_group:
                contexts.enter_context(process_group(port, wait_s))
                has_group = True
            pipe.send_bytes(pickle.dumps(compute(case, arguments)))
            continue
        child = os.fork()
        if not child:
            answer(pipe, case, arguments, port, wait_s)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:  # it has sent nothing
            pipe.send_bytes(pickle.dumps((f"died with status {status}", None)))


def answer(pipe: Connection, case: str, arguments: dict, port: int, wait_s: float | None) -> None:
    """In the forked process, which it ends."""
    end_with(os.getppid())
    try:
        with process_group(port, wait_s):
            answered = compute(case, arguments)
    except BaseException:
        answered = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(answered))
    os._exit(0)


def compute(case: str, arguments: dict) -> tuple[str | None, object]:
    """(traceback, result), one of which is None."""
    failure = result = None
    try:
        module, _, function = case.partition(":")
        result = getattr(importlib.import_module(module), function)(**arguments)
    except BaseException:  # every failure of a case is a failure of its test
        failure = traceback.format_exc()
    gc.collect()  # models are in cycles
    sys.stdout.flush()
    sys.stderr.flush()
    return failure, result


@contextlib.contextmanager
def process_group(port: int, wait_s: float | None) -> Iterator[None]:
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Ranks meet at the store, which waits longer than their collectives may: a busy machine starts one late.
    store = torch.distributed.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=MEETING_S))
    settings = {} if wait_s is None else {"timeout": timedelta(seconds=wait_s)}
    backend = "nccl" if "PRETENDED_CUDA" in os.environ else "gloo"  # tests/rehearsal
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, **settings)
    yield
    torch.distributed.destroy_process_group()


def main(parent: str, descriptor: str, wait_s: str | None = None) -> None:
    end_with(int(parent))
    importlib.import_module("helpers.tiny_models")
    importlib.import_module("nemo_edo.models")
    importlib.import_module("nemo_edo.megatron.checkpoint")
    if LASTING not in os.environ:
        import_bridge()
    serve(Connection(int(descriptor)), None if wait_s is None else float(wait_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
