"""Runs a check in separate processes: one on each rank, or one on the first rank only.

What a check breaks (a CUDA error lasts as long as its process, a crash ends it, a rank may wait for another for ever)
does not reach the next one. The processes are forked from one that has imported everything; with GPUs, where a fork of
such a process can use them, and are otherwise started anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.utils.processes import end_with

WAIT = timedelta(minutes=10)
"""For other ranks, whose checks may hang until their limits."""
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
ALONE = dict.fromkeys(_OF_TORCHRUN)
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"


class Ranks:
    """How the ranks of a torchrun, or of a Slurm job, find each other outside torch.distributed: in its store. A rank
    whose check has failed could not take part in a collective."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._store = None
        if self.world > 1:
            from torch.distributed import TCPStore

            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            hosts = self.rank == 0 and os.environ.get(_AGENT) != "True"
            self._store = TCPStore(address, port, is_master=hosts, timeout=WAIT)

    def variables_of_world(self, number: int) -> dict[str, str | None]:
        """Changes to the environment with which the processes of check ``number`` meet each other, once all are about
        to start: a separate store, because torchrun's still has the previous check's addresses."""
        if self._store is None:
            return ALONE
        if self.rank == 0:
            self._store.set(f"selftest/port_{number}", str(_free_port()))
        port = self._store.get(f"selftest/port_{number}").decode()
        self.meet(str(number))
        return {_AGENT: None, "MASTER_PORT": port}

    def exchanged(self, name: str, value: Any) -> list[Any]:
        """The JSON value of each rank, on all of them."""
        if self._store is None:
            return [value]
        self._store.set(f"selftest/{name}_{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"selftest/{name}_{rank}")) for rank in range(self.world)]

    def meet(self, name: str) -> None:
        """Returns once every rank has called it with this name."""
        if self._store is not None and self._store.add(f"selftest/{name}", 1) == self.world:
            self._store.set(f"selftest/{name}/all", "")
        if self._store is not None:
            self._store.get(f"selftest/{name}/all")

    def gathered(self, value: Any) -> list[Any]:
        """The JSON value of each rank, on all of them, at the end: rank 0 may keep the store, and leaves last."""
        found = self.exchanged("value", value)
        self.meet("gathered")
        return found


class CheckError(Exception):
    """What a check's process died of, in one line."""


@dataclass(frozen=True)
class Isolation:
    """logs: a folder for what the processes print. fork: whether they are forked."""

    ranks: Ranks
    logs: Path
    fork: bool

    def run(self, number: int, call: Callable[..., Any], *arguments: Any, world: bool, limit_s: float) -> Any:
        """What ``call(*arguments)`` returns in a new process. All ranks call this with the check's ``number``.

        world: whether the processes of all ranks are one torch.distributed world; otherwise it is one process alone.
        Raises CheckError where the process fails, or does not end within ``limit_s`` seconds.
        """
        environment = self.ranks.variables_of_world(number) if world else ALONE
        context = multiprocessing.get_context("fork" if self.fork else "spawn")
        log = self.logs / f"check_{number}_rank_{self.ranks.rank}.log"
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
