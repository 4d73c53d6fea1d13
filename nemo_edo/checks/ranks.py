"""How the ranks of a check meet, and how a check runs in processes of its own.

What a check breaks (a CUDA error lasts as long as its process, a crash ends it, a rank may wait for another for ever)
does not reach the next one. Processes are forked from one that has imported everything; with GPUs, where a fork of such
a process can use them, and are otherwise started anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.utils.processes import end_with

AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun where its agent has the store at MASTER_PORT."""
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
ALONE: dict[str, str | None] = dict.fromkeys(_OF_TORCHRUN)
"""Changes to the environment of a process that belongs to no world."""
LEAVING_S = 10.0


class CheckError(Exception):
    """What a check's process died of."""


class Ranks:
    """The ranks of a torchrun or a Slurm step. They meet in a TCP store, outside torch.distributed: a rank whose check
    has failed could not take part in a collective."""

    def __init__(self, rank: int = 0, world: int = 1, limit_s: float = 0.0) -> None:
        """The store's place is in torchrun's variables. limit_s: how long one waits for the others. Raises torch's
        DistError where the first rank cannot be reached."""
        self.rank, self.world, self.limit_s = rank, world, limit_s
        self._store = None
        self._silent: set[int] = set()
        if world > 1:
            from torch.distributed import TCPStore

            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            hosts, limit = rank == 0 and os.environ.get(AGENT) != "True", timedelta(seconds=limit_s)
            self._store = TCPStore(address, port, is_master=hosts, timeout=limit, wait_for_workers=False)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """The JSON value of each rank, the same on all of them; None for a rank that does not answer in time. Every
        rank calls this with the same names."""
        if self._store is None:
            return [value]
        self._store.set(f"checks/{name}/{self.rank}", json.dumps(value))
        if self.rank == 0:  # it alone reads them: if all did, 1,000 ranks would read a million
            deadline = time.monotonic() + self.limit_s
            # One that has been silent once is not waited for again: its limit would be spent by every exchange.
            answers = [
                self._answer(f"checks/{name}/{rank}", 0.0 if rank in self._silent else deadline)
                for rank in range(self.world)
            ]
            self._silent = {rank for rank, answer in enumerate(answers) if answer is None}
            self._store.set(f"checks/{name}", json.dumps(answers))
        self._store.wait([f"checks/{name}"], timedelta(seconds=2 * self.limit_s))
        return json.loads(self._store.get(f"checks/{name}"))

    def _answer(self, key: str, deadline: float) -> Any:
        from torch.distributed import DistStoreError

        try:
            self._store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
        except DistStoreError:
            return None
        return json.loads(self._store.get(key))

    def variables_of_world(self, name: str) -> dict[str, str | None]:
        """Changes to the environment with which the processes of a check meet each other, once all are about to start:
        a separate store, because torchrun's still has the previous check's addresses."""
        if self._store is None:
            return ALONE
        port = self.exchange(name, _free_port())[0]
        return {AGENT: None, "MASTER_PORT": str(port)}

    def leave(self) -> None:
        """Keeps the first rank, which may have the store, until the others have read from it."""
        if self._store is None:
            return
        self._store.add("checks/left", 1)
        until = time.monotonic() + LEAVING_S
        while self.rank == 0 and self._store.add("checks/left", 0) < self.world and time.monotonic() < until:
            time.sleep(0.05)


def run_apart(
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    environment: Mapping[str, str | None],
    log: Path,
    fork: bool,
    limit_s: float,
) -> Any:
    """What ``call(*arguments)`` returns in a new process, whose output goes to the log.

    environment: changes to the variables; None removes one. Raises CheckError where the process fails, or does not end
    within the limit.
    """
    context = multiprocessing.get_context("fork" if fork else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, os.getpid(), log, environment, call, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise CheckError(f"it did not end within {limit_s:.0f} s; its output is in {log}")
        good, value = ours.recv()
    except EOFError:
        process.join()
        raise CheckError(f"its process ended with status {process.exitcode}; its output is in {log}") from None
    finally:
        process.kill()
        process.join()
    if not good:
        raise CheckError(f"{value}; its output is in {log}")
    return value


def forks_use_gpus() -> bool:
    """Whether a fork of this process can use the GPU once this one has imported everything: not where an import has
    asked the driver for it."""
    import torch

    import nemo_edo.models  # noqa: F401

    child = os.fork()
    if not child:
        status = 1
        try:
            torch.zeros(1, device="cuda")
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _child(
    pipe: Connection,
    parent: int,
    log: Path,
    environment: Mapping[str, str | None],
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    end_with(parent)
    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        result = (True, call(*arguments))
    except UserError as error:
        result = (False, str(error))
    except Exception as error:  # whatever a check raises belongs into the table
        traceback.print_exc()
        said = str(error).strip().partition("\n")[0] or "no message"
        result = (False, f"{type(error).__name__}: {said}")
    pipe.send(result)
    sys.stdout.flush()
    os._exit(0)  # neither the parent's clean-up nor a group that waits for other ranks
