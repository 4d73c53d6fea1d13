"""Ranks of distributed tests.

A case is a function of a module, called with keyword arguments on each rank of a gloo group. The ranks are forked for
each case: in processes that lived on, the threads of every group that Megatron has made and forgotten would go on
polling.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait

from helpers.forked import FORK, Child
from helpers.ports import free_ports

MEETING_S = 300.0
GRACE_S = 10.0
"""How long the others may take once a rank has failed: they may wait for it in a collective until the limit."""


class CaseFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message has the tracebacks and the last output."""


class WorkerPool:
    """``world_size`` ranks; use as a context manager. ``environment``: that of ranks which run all cases, to save each
    the first use of Megatron; they must leave it as they found it."""

    def __init__(self, world_size: int, *, environment: Mapping[str, str] | None = None) -> None:
        self.world_size, self._environment = world_size, environment
        self._ranks: list[tuple[Child, Connection]] = []
        self._output = tempfile.NamedTemporaryFile()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_) -> None:
        self._stop()
        self._output.close()

    def run(self, case: str, *, limit_s: float = 1200.0, **arguments) -> list:
        """What ``case``, "module:function", returns on each rank; raises CaseFailed."""
        if not self._ranks:
            self._start()
        begin = self._output.seek(0, os.SEEK_END)
        for _, pipe in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is found below
                pipe.send_bytes(pickle.dumps((case, arguments)))
        results, failures = self._collect(limit_s)
        if failures or self._environment is None:
            self._stop()
        if failures:
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
        [port] = free_ports(1)
        for rank in range(self.world_size):
            ours, theirs = FORK.Pipe()
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
            child = Child(_serve, theirs, port, output=self._output.name, environment=place,
                          imported_under=self._environment)
            theirs.close()
            self._ranks.append((child, ours))

    def _stop(self) -> None:
        for child, pipe in self._ranks:
            pipe.close()
            child.kill()
        self._ranks.clear()


def _serve(pipe: Connection, port: int) -> int:
    """On a rank: runs cases until the pool's process closes its end."""
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Ranks meet at the store, which waits longer than their collectives may: a busy machine starts one late.
    store = torch.distributed.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=MEETING_S))
    backend = "nccl" if "PRETENDED_CUDA" in os.environ else "gloo"  # tests/rehearsal
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    while True:
        try:
            case, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return 0
        failure = result = None
        try:
            module, _, function = case.partition(":")
            result = getattr(importlib.import_module(module), function)(**arguments)
        except BaseException:  # every failure of a case is a failure of its test
            failure = traceback.format_exc()
        gc.collect()  # models are in cycles
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(pickle.dumps((failure, result)))
