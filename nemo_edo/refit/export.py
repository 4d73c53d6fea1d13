"""Folders with the trained weights for servers to load, one for each version."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

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
        self._adapters_alone = adapters_only
        self._num_bytes = num_bytes
        self.root = _fresh_folder(root)
        self._end = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    @property
    def base(self) -> Path | None:
        """The folder of the base weights; None where adapters are merged."""
        return self.root / BASE if self._adapters_alone else None

    def write(self, version: int) -> Path:
        """Writes the current weights. Raises UserError where the file system lacks room."""
        if self.base is not None and not self.base.is_dir():
            unfinished = self._begin(self.base)
            self._workers.call(Worker.export, unfinished, SHARD_BYTES, False)
            unfinished.rename(self.base)
        folder = self.root / f"version_{version:05d}"
        unfinished = self._begin(folder)
        if self._adapters_alone:
            self._workers.call(Worker.export_adapters, unfinished, None)
        else:
            self._workers.call(Worker.export, unfinished, SHARD_BYTES, True)
        unfinished.rename(folder)
        return folder

    def keep_only(self, folder: Path) -> None:
        """Removes all other versions, which no server needs any more."""
        for other in self.root.iterdir():
            if other not in (folder, self.base):
                shutil.rmtree(other)

    def _begin(self, folder: Path) -> Path:
        require_room(self.root, self._num_bytes)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        return unfinished


def _fresh_folder(root: Path) -> Path:
    try:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        return Path(tempfile.mkdtemp(dir=root, prefix="refit_"))
    except OSError as error:
        raise UserError(f"generation.refit.folder: {root} cannot be written: {error}") from error


def require_room(root: Path, needed: int) -> None:
    """Raises UserError where the file system of ``root`` has fewer bytes free."""
    free = free_bytes(root)
    if free < needed:
        raise UserError(
            f"generation.refit.folder: {root} has {free / 2**30:.2f} GiB free, and a refit needs {needed / 2**30:.2f}: "
            "free some space, or name a folder of another file system that the servers see"
        )
