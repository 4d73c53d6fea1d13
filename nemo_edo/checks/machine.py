"""What a check is, how it ends, and the machine that it runs on: the facts of every rank, how ranks meet, and how a
check gets a separate process.

What a check breaks (a CUDA error lasts as long as its process, a crash ends it, a rank may wait for another for ever)
does not reach the next one. Processes are forked from one that has imported everything; with GPUs, only where a fork of
such a process can use them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.checks.installed import installed, versions
from nemo_edo.errors import UserError
from nemo_edo.run.control import control_folder
from nemo_edo.utils.memory import total_bytes
from nemo_edo.utils.processes import end_with

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PASS, FAIL, IMPOSSIBLE = "pass", "fail", "not possible"
# Who runs a check: the doctor, in seconds; the selftest, which tries things; a Slurm job, before its training.
DOCTOR, SELFTEST, NODES = "doctor", "selftest", "nodes"


@dataclass(frozen=True)
class Finding:
    status: str  # PASS, FAIL or IMPOSSIBLE (on this machine)
    detail: str  # the measurement, the fault, or why the check is not possible; may have several lines
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)  # by name, with the unit in the name


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    run: Callable[[Machine], Finding]
    runs_in: Sequence[str] = (SELFTEST,)
    every_rank: bool = False  # whether each rank runs it; otherwise the first one does
    remedy: str = ""  # for a failure whose finding names none
    # What it needs.
    processes: int = 1
    nodes: int = 1
    gpu: bool = False
    te: float = 0.0  # Transformer Engine, on GPUs of this capability
    spare_gpus: int = 0  # of a node with GPUs, more than the trainer has

    def lacking(self, machine: Machine) -> str | None:
        """Why the machine cannot do it; None where it can."""
        if self.gpu and not machine.gpus:
            return "it needs a GPU"
        if machine.world < (n := self.processes):
            return f"it needs {n} processes: torchrun --nproc-per-node {n} --no-python nemo-edo selftest"
        if self.nodes > 1 and machine.world == machine.local_size:
            return "it needs a second node"
        if self.te and not machine.gpus:
            return "it needs a GPU and Transformer Engine"
        if self.te and not machine.has_te:
            return "Transformer Engine is not installed"
        if self.te and (here := float(machine.gpus[0].capability)) < self.te:
            return f"it needs a GPU of capability {self.te}; this is {here}"
        spare = max(0, len(machine.gpus) - machine.local_size)
        if machine.gpus and spare < self.spare_gpus:
            return f"it needs {self.spare_gpus} more GPUs on a node than the trainer has"
        return None


def passed(detail: str, **figures: float) -> Finding:
    return Finding(PASS, detail, figures=figures)


def failed(detail: str, remedy: str = "", **figures: float) -> Finding:
    return Finding(FAIL, detail, remedy, figures)


def impossible(why: str) -> Finding:
    return Finding(IMPOSSIBLE, why)


def together(of_ranks: Mapping[int, Finding | None], named: Callable[[int], str]) -> Finding:
    """One finding for all ranks: what failed ranks say, otherwise the first rank's. None: the rank did not answer."""
    answers = {rank: finding or failed("has stopped answering") for rank, finding in of_ranks.items()}
    faults = {rank: finding for rank, finding in answers.items() if finding.status == FAIL}
    if not faults:
        return answers[0]
    first, details = next(iter(faults.values())), {fault.detail for fault in faults.values()}
    detail = "\n".join(f"{named(rank)}: {fault.detail}" for rank, fault in faults.items())
    if len(faults) == len(of_ranks) and len(details) == 1:  # all ranks have compared the same facts
        detail = first.detail
    remedy = next((fault.remedy for fault in faults.values() if fault.remedy), "")
    return Finding(FAIL, detail, remedy, first.figures)


# --- ranks and processes ----------------------------------------------------------------------------------------------

TE = "transformer-engine"
LIMIT_S = 90.0  # for the process of one check
LEAVING_S = 10.0
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun where its agent serves the store at MASTER_PORT
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")


class CheckError(Exception):
    """Why the process of a check failed."""


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """The ranks that checks run on. ``gpus`` and ``has_te``, by which all ranks decide, are the least that one has."""

    facts: list[dict[str, Any] | None]  # ``facts_here`` of each rank; None for a rank that has not reported
    folder: Path  # for files that every node must see
    scratch: Path  # for this process alone: models, and the output of checks' processes
    rank: int = 0
    nodes: tuple[str, ...] = ()  # Slurm's names of the nodes, in the order of their ranks
    # Ranks meet in it, outside torch.distributed: a rank whose check has failed could not take part in a collective.
    store: TCPStore | None = None
    limit_s: float = 0.0  # how long a rank waits for the others
    silent: set[int] = field(default_factory=set)  # on rank 0: ranks that did not answer the last question
    references: dict[Any, Any] = field(default_factory=dict)  # what several checks compare with, by what it is of
    forks: bool = True  # whether the processes of checks are forked
    check: str = ""  # the name of the check that runs
    gpus_expected: int = 0  # of each node

    @classmethod
    def of_ranks(
        cls, folder: Path, *, limit_s: float, nodes: tuple[str, ...] = (), start_limit_s: float = 0.0
    ) -> Machine:
        """This rank of a torchrun or a Slurm step, whose variables say where the store is. start_limit_s: for ranks to
        start, where it is more than limit_s. Raises torch's DistError where the first rank cannot be reached."""
        rank, world, store = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), None
        if world > 1:
            from torch.distributed import TCPStore

            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            serves = rank == 0 and os.environ.get(AGENT) != "True"
            limit = timedelta(seconds=max(limit_s, start_limit_s))
            store = TCPStore(address, port, is_master=serves, timeout=limit, wait_for_workers=False)
        # A job's folder outlives the node's own, which may be private to the job.
        place = control_folder()
        if place is not None and not os.access(place, os.W_OK):
            place = None
        scratch = Path(tempfile.mkdtemp(prefix="nemo_edo_checks_", dir=place))
        machine = cls([None] * world, folder, scratch, rank, nodes, store, max(limit_s, start_limit_s))
        facts = machine.exchange("facts", facts_here(with_torch=world > 1))
        machine = replace(machine, facts=facts, limit_s=limit_s)
        return replace(machine, forks=not machine.gpus)

    @classmethod
    def alone(cls) -> Machine:
        """This process, which meets no others and starts none."""
        return cls([facts_here(with_torch=False)], Path(), Path())

    @property
    def world(self) -> int:
        return len(self.facts)

    @property
    def local_size(self) -> int:
        """Ranks per node."""
        return max(1, self.world // len(self.nodes or {facts["host"] for facts in self.facts if facts}))

    @property
    def gpus(self) -> list[Gpu]:
        return [Gpu(**gpu) for gpu in min((facts["gpus"] for facts in self.facts if facts), key=len)]

    @property
    def has_te(self) -> bool:
        return all(facts["versions"].get(TE) is not None for facts in self.facts if facts)

    def named(self, rank: int) -> str:
        """A rank with its node: Slurm's name for it, otherwise the host's."""
        host = facts["host"] if (facts := self.facts[rank]) else None
        node = self.nodes[rank // self.local_size] if self.nodes else host
        return f"rank {rank} (node {node})" if node else f"rank {rank}"

    def exchange(self, name: str, value: Any) -> list[Any]:
        """The JSON value of each rank, the same on all of them; None for a rank that does not answer in time. Every
        rank calls this with the same names."""
        if self.store is None:
            return [value]
        key = f"checks/{self.check}/{name}"
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:  # it alone reads them: if all did, 1,000 ranks would read a million values
            from torch.distributed import DistStoreError

            answers, deadline = [], time.monotonic() + self.limit_s
            for rank in range(self.world):
                # One limit for all ranks, and none for a rank that has been silent: each exchange would spend it.
                left = 0.0 if rank in self.silent else deadline - time.monotonic()
                try:
                    self.store.wait([f"{key}/{rank}"], timedelta(seconds=max(0.05, left)))
                    answers.append(json.loads(self.store.get(f"{key}/{rank}")))
                    self.silent.discard(rank)
                except DistStoreError:
                    answers.append(None)
                    self.silent.add(rank)
            self.store.set(key, json.dumps(answers))
        self.store.wait([key], timedelta(seconds=2 * self.limit_s))
        return json.loads(self.store.get(key))

    def leave(self) -> None:
        """Keeps the first rank, which may serve the store, until the others have read from it."""
        if self.store is None:
            return
        self.store.add("checks/left", 1)
        until = time.monotonic() + LEAVING_S
        while self.rank == 0 and self.store.add("checks/left", 0) < self.world and time.monotonic() < until:
            time.sleep(0.05)

    def run(self, call: Callable[..., Any], *arguments: Any, world: bool = False, limit_s: float = LIMIT_S) -> Any:
        """Returns what ``call(*arguments)`` returns in a new process of this rank, with its output in a log. world:
        whether the processes of all ranks, each of which calls this, are one torch.distributed world; otherwise the
        process is alone. Raises CheckError where the process fails, or does not end within the limit."""
        environment: dict[str, str | None] = dict.fromkeys(OF_TORCHRUN)
        if world and self.store is not None:  # with another store: torchrun's has the previous check's addresses
            with socket.socket() as listening:
                listening.bind(("", 0))
                port = listening.getsockname()[1]
            environment = {AGENT: None, "MASTER_PORT": str(self.exchange("port", port)[0])}
        log = self.scratch / f"{''.join(c if c.isalnum() else '_' for c in self.check)}_rank_{self.rank}.log"
        context: Any = multiprocessing.get_context("fork" if self.forks else "spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(theirs, os.getpid(), log, environment, partial(call, *arguments))
        )
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


def _child(pipe: Connection, parent: int, log: Path, changes: dict[str, str | None], call: Callable[[], Any]) -> None:
    """Sends whether the call succeeded, and its result or why not. changes: of the environment; None removes one."""
    end_with(parent)
    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    for name in changes:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        result = (True, call())
    except UserError as error:
        result = (False, str(error))
    except Exception as error:  # whatever a check raises belongs into the table
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0] or "no message"
        result = (False, f"{type(error).__name__}: {first_line}")
    pipe.send(result)
    sys.stdout.flush()
    os._exit(0)  # neither the parent's clean-up nor a group that waits for other ranks


def forks_use_gpus() -> bool:
    """Whether a fork of this process can use the GPU: not where an import has asked the driver for it."""
    import torch

    import nemo_edo.models  # noqa: F401

    fork: Any = multiprocessing.get_context("fork")
    process = fork.Process(target=torch.zeros, args=(1,), kwargs={"device": "cuda"})
    process.start()
    process.join()
    return process.exitcode == 0


def facts_here(*, with_torch: bool) -> dict[str, Any]:
    """The host, GPUs and versions of this rank's node. with_torch: imports torch, adds CUDA's and NCCL's versions."""
    found, driver_error = [], None
    try:
        found = gpus()
    except UserError as error:
        driver_error = str(error)
    of_packages = {**versions(), TE: installed(TE)}
    if with_torch and found:
        import torch

        of_packages["CUDA"] = torch.version.cuda
        if torch.version.cuda:  # otherwise it has no nccl.version
            of_packages["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "host": socket.gethostname(),
        "gpus": [asdict(gpu) for gpu in found],
        "driver_error": driver_error,
        "versions": of_packages,
    }


def gpus() -> list[Gpu]:
    """The GPUs that the driver's ``nvidia-smi`` lists and CUDA_VISIBLE_DEVICES leaves to this process; none without a
    driver. Raises UserError where it fails, as for a GPU that does not exist."""
    tool, chosen = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or chosen in ("", "-1"):
        return []
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    if chosen is not None and "MIG-" not in chosen:  # instances of a partitioned GPU are not listed
        query.append(f"--id={chosen}")
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise UserError("nvidia-smi does not answer within 60 s; repair the GPU's driver") from error
    if result.returncode:
        of = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
        raise UserError(f"nvidia-smi fails{of}: {(result.stderr or result.stdout).strip()}; repair the GPU's driver")
    rows = [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines() if line.strip()]
    return [  # a GPU that shares the host's memory (DGX Spark's) has [N/A]
        Gpu(name, int(mebibytes) * 2**20 if mebibytes.isdecimal() else total_bytes(), capability)
        for name, mebibytes, capability in rows
    ]
