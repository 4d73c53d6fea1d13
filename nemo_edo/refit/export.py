"""Folders with the trained weights for servers to load, one for each version."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_edo.errors import UserError
from nemo_edo.megatron.bridge import BuiltModel
from nemo_edo.megatron.hf_export import export_adapter_folder, export_hf_folder
from nemo_edo.parallel.main_rank import is_main, on_main
from nemo_edo.rollouts.disk_space import free_bytes

BASE = "base"


class WeightFolders:
    """Hugging Face folders below ``root``, one for each version. A folder gets its name only once it is complete. All
    ranks call the methods; the first one writes, and gathers one tensor at a time from the others."""

    def __init__(self, root: Path, built: BuiltModel, num_bytes: int, *, adapters_only: bool = False) -> None:
        """root: a folder for this run only; what an earlier process has left there is removed. num_bytes: size of the
        model's weights. adapters_only: a version is a folder of PEFT adapters, and the base weights have one folder."""
        self._built = built
        self._adapters_alone = adapters_only
        self._num_bytes = num_bytes
        self.root = on_main(lambda: _fresh_folder(root))
        if is_main():
            self._end = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    @property
    def base(self) -> Path | None:
        """The folder of the base weights; None where adapters are merged."""
        return self.root / BASE if self._adapters_alone else None

    def write(self, version: int) -> Path:
        """Writes the current weights. Raises UserError where the file system lacks room."""
        if self.base is not None and not on_main(self.base.is_dir):
            self._write(self.base, partial(export_hf_folder, self._built, merge_adapters=False))
        export = export_adapter_folder if self._adapters_alone else export_hf_folder
        return self._write(self.root / f"version_{version:05d}", partial(export, self._built))

    def keep_only(self, folder: Path) -> None:
        """Removes all other versions, which no server needs any more."""
        kept = (folder, self.base)
        on_main(lambda: [shutil.rmtree(other) for other in self.root.iterdir() if other not in kept] and None)

    def _write(self, folder: Path, export: Callable[[Path], None]) -> Path:
        unfinished = on_main(lambda: self._begin(folder))
        export(unfinished)
        on_main(lambda: unfinished.rename(folder) and None)
        return folder

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
