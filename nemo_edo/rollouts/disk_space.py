"""The disk space that a run's rollouts need, and what there is."""

from __future__ import annotations

import shutil
from pathlib import Path

from nemo_edo.errors import UserError


class DiskSpaceError(UserError):
    """The file system is too full for the run."""


def estimate_bytes(num_rollouts: int, max_prompt: int, max_response: int) -> int:
    """An upper bound, in bytes, of the disk space of rollouts with the given lengths in tokens.

    Ids and log-probabilities take 4 bytes each; 8 bytes of text per token are generous; compression is left out.
    """
    per_rollout = 4 * max_prompt + (4 + 4 + 8) * max_response + 256
    file_overhead = 32 * 1024
    return num_rollouts * per_rollout + file_overhead


def free_bytes(folder: str | Path) -> int:
    """Free bytes of the file system of ``folder``, which need not exist yet."""
    folder = Path(folder).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def check_disk_space(folder: str | Path, needed_bytes: int) -> None:
    """Raises DiskSpaceError if the file system of ``folder`` (which need not exist yet) has less space free."""
    folder, free = Path(folder).absolute(), free_bytes(folder)
    if free < needed_bytes:
        raise DiskSpaceError(
            f"{folder}: needs {_size(needed_bytes)} for rollouts but has {_size(free)} free; "
            "free some space, or set output_dir to another file system"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
