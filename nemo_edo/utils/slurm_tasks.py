"""What Slurm tells a task about itself, and the name by which one node reaches another."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from nemo_edo.errors import UserError


def variables_of_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for torch.distributed, of a task that is one process."""
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": environment["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0],
    }


def first_that_resolves(*names: str) -> str:
    """The first of a node's names that resolves here: Slurm's, which DNS may not know, and the machine's.

    Raises UserError where none does.
    """
    for name in filter(None, names):
        try:
            socket.gethostbyname(name)
        except OSError:
            continue
        return name
    raise UserError(f"none of a node's names resolves here: {', '.join(names)}")
