"""Folders with the trained weights for servers to load, one for each version."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.rollouts.disk_space import free_bytes
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Worker

BASE = "base"
SHARD_BYTES = 5 * 10**9
"""Bytes of a file of weights, at most."""


class WeightFolders:
    """Hugging Face folders below ``root``, one for each version. A folder gets its name only once it is complete. Rank
    0's worker writes, and gathers one tensor at a time from the others."""

    def __init__(self, root: Path, workers: Workers, num_bytes: int, *, adapters_only: bool = False) -> None:
        """root: a folder for this run only; what an earlier process has left there is removed. num_bytes: size of the
        model's weights. adapters_only: a version is a folder of PEFT adapters, and the base weights have one folder."""
        self._workers = workers
        self._num_bytes = num_bytes
        try:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            self.root = Path(tempfile.mkdtemp(dir=root, prefix="refit_"))
        except OSError as error:
            raise UserError(f"generation.refit.folder: {root} cannot be written: {error}") from error
        self.base = self.root / BASE if adapters_only else None
        """The folder of the base weights; None where adapters are merged."""
        self._end = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def write(self, version: int) -> Path:
        """Writes the current weights. Raises UserError where the file system lacks room."""
        if self.base is None:
            return self._write(f"version_{version:05d}", Worker.export, SHARD_BYTES, True)
        if not self.base.is_dir():
            self._write(BASE, Worker.export, SHARD_BYTES, False)
        return self._write(f"version_{version:05d}", Worker.export_adapters, None)

    def _write(self, name: str, export: Callable[..., None], *settings: Any) -> Path:
        require_room(self.root, self._num_bytes)
        folder, unfinished = self.root / name, self.root / f"{name}.part"
        for left in (folder, unfinished):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir()
        self._workers.call(export, unfinished, *settings)
        return unfinished.rename(folder)

    def keep_only(self, folder: Path) -> None:
        """Removes all other versions, which no server needs any more."""
        for other in self.root.iterdir():
            if other not in (folder, self.base):
                shutil.rmtree(other)


def require_room(root: Path, needed: int) -> None:
    """Raises UserError where the file system of ``root`` has fewer bytes free."""
    free = free_bytes(root)
    if free < needed:
        raise UserError(
            f"generation.refit.folder: {root} has {free / 2**30:.2f} GiB free, and a refit needs {needed / 2**30:.2f}: "
            "free some space, or name a folder of another file system that the servers see"
        )
