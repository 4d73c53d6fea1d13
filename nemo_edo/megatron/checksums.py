"""Checksums of a checkpoint's files: damage is found before training resumes from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nemo_edo.errors import UserError
from nemo_edo.parallel.main_rank import on_main
from nemo_edo.utils.files import checksum, read_object, write_text

FILE = "checksums.json"


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not those that were written."""


def write_checksums(folder: Path, known: dict[str, str]) -> None:
    """Adds ``checksums.json`` to a folder that all ranks have written into. Every rank calls it with what it knows of
    the checksums, by file name; the first one reads what is left."""
    found: list[dict[str, str] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, known)

    def write() -> None:
        checksums = {name: value for part in found for name, value in part.items()}
        checksums |= {name: checksum(folder / name) for name in _files(folder) if name not in checksums}
        write_text(folder / FILE, json.dumps(checksums, indent=1, sort_keys=True) + "\n")

    on_main(write)


def check_checksums(folder: Path) -> None:
    """Raises DamagedCheckpoint, on every rank, if a file is missing, new or changed. Every rank reads its share."""
    faults: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(faults, _fault(folder))
    if fault := next(filter(None, faults), None):
        raise DamagedCheckpoint(f"{folder} is damaged: {fault}")


def _fault(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    try:
        expected = read_object(folder / FILE, required=())
    except UserError:
        return f"{FILE}, which tells what was written, is missing or damaged"
    present = _files(folder)
    if different := set(present) ^ expected.keys():
        name = min(different)
        return f"{name} is {'missing' if name in expected else 'not one of its files'}"
    for name in present[torch.distributed.get_rank() :: torch.distributed.get_world_size()]:
        if checksum(folder / name) != expected[name]:
            return f"{name} has other content than was written"
    return None


def _files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path != Path(FILE))
