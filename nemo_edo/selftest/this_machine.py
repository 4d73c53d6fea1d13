"""What a selftest knows of the machine before it tries anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_edo.doctor.machine import Gpu, gpus, installed
from nemo_edo.selftest.isolated import Isolation, Ranks


@dataclass(frozen=True)
class Machine:
    """folder: for what every node must see. scratch: a folder of this process. capability: the first GPU's, such as
    (9, 0); None without GPUs."""

    folder: Path
    scratch: Path
    isolation: Isolation
    gpus: list[Gpu]
    rank: int
    world: int

    @property
    def has_te(self) -> bool:
        return installed("transformer-engine") is not None

    @property
    def capability(self) -> tuple[int, int] | None:
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


def machine(folder: Path, scratch: Path) -> Machine:
    """Raises UserError where the GPUs' driver fails."""
    found = gpus()
    logs = scratch / "logs"
    logs.mkdir()
    ranks = Ranks()
    return Machine(folder, scratch, Isolation(ranks, logs, fork=not found), found, ranks.rank, ranks.world)
