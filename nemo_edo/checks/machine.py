"""What the checks know about the machine: the GPUs, and the facts of every rank."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemo_edo.checks.installed import installed, versions
from nemo_edo.checks.ranks import ALONE, Ranks, run_apart
from nemo_edo.errors import UserError

TE = "transformer-engine"
LIMIT_S = 90.0
"""Of a check's process."""


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """Where the checks run. What all ranks decide on (``gpus``, ``has_te``) is the least that one of them has."""

    facts: list[dict[str, Any] | None]
    """Of each rank, as ``facts_here`` has them; None of one that has not reported."""
    ranks: Ranks
    folder: Path
    """For what every node must see."""
    scratch: Path
    """Of this process alone; of the processes' output, too."""
    nodes: tuple[str, ...] = ()
    """Slurm's names of the nodes, in the order of their ranks."""
    forks: bool = True
    """Whether processes are forked."""
    check: str = ""
    """The name of the check that runs."""

    @classmethod
    def of_ranks(cls, folder: Path, *, limit_s: float, nodes: tuple[str, ...] = ()) -> Machine:
        """Raises torch's DistError where the first rank cannot be reached."""
        ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), limit_s)
        facts = ranks.exchange("facts", facts_here(with_torch=ranks.world > 1))
        scratch = Path(tempfile.mkdtemp(prefix="nemo_edo_checks_"))
        machine = cls(facts, ranks, folder, scratch, nodes)
        return replace(machine, forks=not machine.gpus)

    @classmethod
    def alone(cls) -> Machine:
        """This process, which is not to meet others or to start any."""
        return cls([facts_here(with_torch=False)], Ranks(), Path(), Path())

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world(self) -> int:
        return len(self.facts)

    @property
    def local_size(self) -> int:
        """Ranks of a node."""
        return max(1, self.world // len(self.nodes or {facts["host"] for facts in self.facts if facts}))

    @property
    def driver_error(self) -> str | None:
        """Why the driver of this rank's node fails."""
        return self.facts[self.rank]["driver_error"]

    @property
    def gpus(self) -> list[Gpu]:
        return [Gpu(**gpu) for gpu in min((facts["gpus"] for facts in self.facts if facts), key=len)]

    @property
    def has_te(self) -> bool:
        return all(facts["versions"].get(TE) is not None for facts in self.facts if facts)

    def named(self, rank: int) -> str:
        """A rank with its node: Slurm's name of it, otherwise its own."""
        facts = self.facts[rank]
        if self.nodes:
            return f"rank {rank} (node {self.nodes[rank // self.local_size]})"
        return f"rank {rank} (node {facts['host']})" if facts else f"rank {rank}"

    def exchange(self, name: str, value: Any) -> list[Any]:
        """As ``Ranks.exchange``, for the check that runs."""
        return self.ranks.exchange(f"{self.check}/{name}", value)

    def run(self, call: Callable[..., Any], *arguments: Any, world: bool = False, limit_s: float = LIMIT_S) -> Any:
        """What ``call(*arguments)`` returns in a new process of this rank. Raises CheckError.

        world: whether the processes of all ranks, each of which calls this, are one torch.distributed world; otherwise
        it is one process alone.
        """
        return run_apart(
            call,
            arguments,
            environment=self.ranks.variables_of_world(f"{self.check}/port") if world else ALONE,
            log=self.scratch / f"{''.join(c if c.isalnum() else '_' for c in self.check)}_rank_{self.rank}.log",
            fork=self.forks,
            limit_s=limit_s,
        )


def facts_here(*, with_torch: bool) -> dict[str, Any]:
    """What this rank's node has. with_torch: with the versions of CUDA and NCCL, for which torch is imported."""
    found, driver_error = [], None
    try:
        found = gpus()
    except UserError as error:
        driver_error = str(error)
    of_packages = {**versions(), TE: installed(TE)}
    if with_torch and found:
        import torch

        of_packages |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return {
        "host": socket.gethostname(),
        "gpus": [asdict(gpu) for gpu in found],
        "driver_error": driver_error,
        "versions": of_packages,
    }


def gpus() -> list[Gpu]:
    """Those that the driver's ``nvidia-smi`` lists and CUDA_VISIBLE_DEVICES leaves to this process; none where there is
    no driver. Raises UserError where it fails, as for a GPU that does not exist."""
    tool, chosen = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or chosen in ("", "-1"):
        return []
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    if chosen is not None and "MIG-" not in chosen:  # instances of a partitioned GPU are not listed
        query.append(f"--id={chosen}")
    result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    if result.returncode:
        of = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
        raise UserError(f"nvidia-smi fails{of}: {(result.stderr or result.stdout).strip()}; repair the GPU's driver")
    rows = [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines() if line.strip()]
    return [Gpu(name, int(mebibytes) * 2**20, capability) for name, mebibytes, capability in rows]
