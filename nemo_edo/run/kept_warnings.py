"""A run's warnings, kept in its folder: the report shows them next to the results whose meaning they change."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nemo_edo

FILE = "warnings.jsonl"
PACKAGE = Path(nemo_edo.__file__).parent


@contextmanager
def kept_warnings(folder: Path, stage: Callable[[], str]) -> Iterator[None]:
    """Inside the block, this package's own warnings are also written to the folder, each once, with the stage that they
    came in."""
    show, known = warnings.showwarning, kept(folder)

    def write_and_show(message, category, filename, lineno, file=None, line=None) -> None:
        show(message, category, filename, lineno, file, line)
        entry = {"arm": stage(), "text": str(message)}
        if Path(filename).is_relative_to(PACKAGE) and entry not in known:
            known.append(entry)
            with (folder / FILE).open("a", encoding="utf-8") as out:
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")

    warnings.showwarning = write_and_show
    try:
        yield
    finally:
        warnings.showwarning = show


def kept(folder: Path) -> list[dict[str, str]]:
    path = folder / FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
