"""What the selftest reads about the machine before the first check."""

from __future__ import annotations

import socket
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.doctor.machine import ABOUT, Gpu, gpus, installed, python_version
from nemo_edo.selftest.isolated import Isolation, Ranks

TE = "transformer-engine"
OTHER_FOLDER = "name a folder that every node can write to: --folder"


@dataclass(frozen=True)
class Machine:
    """folder: for what every node must see. scratch: a folder of this process. facts: of each rank, as ``_facts`` has
    them. What the ranks decide on (gpus, has_te, no_server) is the same on all: the least that one of them has."""

    folder: Path
    scratch: Path
    isolation: Isolation
    gpus: list[Gpu]
    facts: list[dict[str, Any]]
    rank: int

    @property
    def world(self) -> int:
        return len(self.facts)

    @property
    def has_te(self) -> bool:
        return all(of_rank["versions"][TE] is not None for of_rank in self.facts)

    @property
    def no_server(self) -> str | None:
        """Why the first rank, which starts servers, can start none."""
        return self.facts[0]["no_server"]

    @property
    def capability(self) -> tuple[int, int] | None:
        """The first GPU's, such as (9, 0); None without GPUs."""
        if not self.gpus:
            return None
        major, _, minor = self.gpus[0].capability.partition(".")
        return int(major), int(minor)

    @property
    def llama(self) -> Path:
        return self.scratch / "llama"

    @property
    def mixture(self) -> Path:
        return self.scratch / "mixture"

    def no_folder(self, number: int) -> str | None:
        """Why some rank cannot write to the shared folder. All ranks call this in check ``number``, and get the
        same."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                own = None
        except OSError as error:
            own = f"rank {self.rank} cannot write to {self.folder}: {error.strerror}"
        return next(filter(None, self.isolation.ranks.exchanged(f"no_folder_{number}", own)), None)

    def odd_ones(self) -> list[str]:
        """What a rank has otherwise than most, in words."""
        found = []
        for name, values in _compared(self.facts).items():
            usual, _ = Counter(values).most_common(1)[0]
            found += [
                f"rank {rank} ({self.facts[rank]['host']}) has {name} {value}, most have {usual}"
                for rank, value in enumerate(values)
                if value != usual
            ]
        return found


def machine(folder: Path, scratch: Path) -> Machine:
    """Raises UserError where the GPUs' driver fails."""
    found = gpus()
    logs = scratch / "logs"
    logs.mkdir()
    ranks = Ranks()
    facts = ranks.exchanged("facts", _facts(found))
    least = min((of_rank["gpus"] for of_rank in facts), key=len)
    return Machine(
        folder, scratch, Isolation(ranks, logs, fork=not found), [Gpu(*gpu) for gpu in least], facts, ranks.rank
    )


def _facts(found: list[Gpu]) -> dict[str, Any]:
    versions = {name: installed(name) for name in (*ABOUT, TE)}
    return {
        "host": socket.gethostname(),
        "gpus": [[gpu.name, gpu.bytes, gpu.capability] for gpu in found],
        "versions": {"python": python_version(), **versions},
        "no_server": _no_server(),
    }


def _compared(facts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By name, the values that should be the same on all ranks."""
    gpus_of = [", ".join(f"{len(of_rank['gpus'])} {gpu[0]}" for gpu in of_rank["gpus"][:1]) or "none"
               for of_rank in facts]  # fmt: skip
    versions = {
        name: [str(of_rank["versions"][name] or "not installed") for of_rank in facts] for name in facts[0]["versions"]
    }
    return {"GPUs": gpus_of, **versions}


def _no_server() -> str | None:
    from nemo_edo.config import ServersConfig
    from nemo_edo.errors import UserError
    from nemo_edo.generation.servers import check_environment
    from nemo_edo.generation.vllm_server import VLLM

    try:
        check_environment(ServersConfig(), VLLM, gpus=0)
    except UserError as error:
        return str(error)
    return None
