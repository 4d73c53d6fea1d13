"""Atomic file writes, JSON files whose mistakes are named, and sizes such as 5GB."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nemo_edo.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that replaces ``path`` at the end, once it is on disk: if the process is killed, ``path`` has
    either its old content or all of the new."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Where ``replacing`` writes; a killed process may leave that file behind."""
    return path.with_name(f".{path.name}.tmp")


def read_text(path: Path) -> str:
    """Raises UserError naming a file that is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a finished run's folder has it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error


def read_json(path: Path) -> Any:
    """Raises UserError naming a file that is missing, and the line of one that is not valid JSON."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid JSON: its brackets are nested too deeply") from error


def read_object(path: Path, required: Collection[str]) -> dict[str, Any]:
    """Raises UserError as ``read_json`` does, and naming a required key that is missing."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise UserError(f"{path}: expected an object, got {type(record).__name__}")
    for key in required:
        if key not in record:
            raise UserError(f"{path}: {key} is missing")
    return record


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(name: str, text: str, units: Collection[str] = _UNITS.keys()) -> int:
    """The bytes of 5GB, 500MB or 2GiB, as ``transformers`` reads them: a number and one of ``units`` (upper case; "" is
    bytes). Raises UserError that names ``name`` for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    size = float(found[1]) * _UNITS[found[2]] if found and found[2] in units else 0
    if not size:
        raise UserError(f"{name} is {text}, expected a size such as 80GB or 2GiB")
    return int(size)
