"""``nemo-edo`` commands, in forked processes that have imported everything, or in new ones."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers.forked import Child

Call = tuple
"""("module:function", argument, ...)."""


def start(*arguments: str, processes: int = 1, **settings) -> subprocess.Popen:
    """``nemo-edo`` in a new process, or in several of torchrun's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", "nemo_edo", *arguments]
    return subprocess.Popen(command, text=True, **settings)


def finish(process: subprocess.Popen, limit_s: float = 500.0) -> tuple[str, str]:
    """What it printed, as ``communicate`` returns it; one that does not end in time is killed."""
    try:
        return process.communicate(timeout=limit_s)
    finally:
        process.kill()


def run(arguments: Sequence[str], before: Sequence[Call] = ()) -> int:
    """In the command's process: its status."""
    from nemo_edo.cli import main

    for path, *given in before:
        module, _, function = path.partition(":")
        getattr(importlib.import_module(module), function)(*given)
    return main(list(arguments))


def script(arguments: Sequence[str], before: Sequence[Call] = ()) -> int:
    """The same for ``python SCRIPT ARGUMENTS``."""
    sys.argv, sys.path[:0] = list(map(str, arguments)), [str(Path(arguments[0]).parent)]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


class Cli:
    """Runs commands in forked processes."""

    def __init__(self, runs: Callable = run) -> None:
        self._runs = runs

    def __call__(
        self, *arguments: str, cwd: Path | None = None, before: Sequence[Call] = (), limit_s: float = 500.0,
        imported_under: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """before: what the command's process calls first; imported_under: as for ``Child``. A signal that ends it is a
        negative ``returncode``."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            child = Child(self._runs, arguments, before, output=out, errors=err, cwd=cwd, imported_under=imported_under)
            status = None
            try:
                status = child.wait(limit_s)
            finally:
                if status is None:
                    child.kill()
            assert status is not None, f"{arguments} has not ended after {limit_s:g} s"
            said = [file.read_bytes().decode(errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess(arguments, status, *said)

    def succeed(self, *arguments: str, **settings) -> str:
        """What a command prints that has to end well: standard output, then errors."""
        done = self(*arguments, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def export(variables: dict[str, str]) -> None:
    """A call for ``before``: environment variables of the command alone."""
    os.environ.update(variables)
