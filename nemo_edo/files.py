"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to. It takes the place of ``path`` at the end, once it is on the disk: whenever the process is
    killed, ``path`` holds what it held before, or all that is new."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Where ``replacing`` writes; a killed process may leave that file behind."""
    return path.with_name(f".{path.name}.tmp")
