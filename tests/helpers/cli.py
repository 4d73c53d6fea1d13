"""``nemo-edo`` commands, each in a process forked from one that has imported everything: a start costs nothing.

What a test that kills its process or watches it needs is ``start``, an ordinary new process.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from helpers.worker_pool import import_bridge

from nemo_edo.utils.processes import end_with

Call = tuple
"""("module:function", argument, ...)."""
IMPORTED = ("models", "megatron.checkpoint", "generation.megatron_engine", "report.page", "run.jobs")
"""Of the package: what commands need."""
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def start(*arguments: str, processes: int = 1, launcher: Sequence[str] = (), **settings) -> subprocess.Popen:
    """``nemo-edo`` in a new process, or in several of torchrun's, with more ``launcher`` arguments for it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *launcher]
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", "nemo_edo", *arguments]
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, text=True, **settings)


def finish(process: subprocess.Popen, limit_s: float = 500.0) -> tuple[str, str]:
    """What it printed, as ``communicate`` returns it; one that does not end in time is killed."""
    try:
        return process.communicate(timeout=limit_s)
    finally:
        process.kill()


class Cli:
    """Runs commands; use as a context manager."""

    def __enter__(self) -> Cli:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-W", "ignore", "-m", "helpers.cli", str(os.getpid()), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, pass_fds=[theirs.fileno()],
                                         start_new_session=True)
        theirs.close()
        return self

    def __exit__(self, *_) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __call__(
        self, *arguments: str, cwd: Path | None = None, before: Sequence[Call] = (), limit_s: float = 500.0
    ) -> subprocess.CompletedProcess[str]:
        """before: what the command's process calls first. A signal that ends it is a negative ``returncode``."""
        self._pipe.send((arguments, cwd or Path.cwd(), before))
        assert self._pipe.poll(limit_s), f"{arguments} has not ended after {limit_s:g} s"
        status, out, err = pickle.loads(self._pipe.recv_bytes())
        return subprocess.CompletedProcess(arguments, status, out, err)

    def succeed(self, *arguments: str, **settings) -> str:
        """What a command prints that has to end well: standard output, then errors."""
        done = self(*arguments, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def export(variables: dict[str, str]) -> None:
    """A call for ``before``: environment variables of the command alone."""
    os.environ.update(variables)


# --- in the process that forks ------------------------------------------------------------------------------------


def run(arguments: Sequence[str], cwd: Path, before: Sequence[Call], files: Sequence[int]) -> None:
    """In the forked process, which it ends."""
    from nemo_edo.cli import main

    status: int | str | None = 1
    for standard, file in zip((1, 2), files, strict=True):
        os.dup2(file, standard)
    try:
        os.chdir(cwd)
        for path, *given in before:
            module, _, function = path.partition(":")
            getattr(importlib.import_module(module), function)(*given)
        status = main(list(arguments))
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # as the interpreter does with what nobody catches
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0 if not isinstance(status, str) else 1)


def serve(pipe: Connection) -> None:
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                run(*request, files=(out.fileno(), err.fileno()))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        pipe.send_bytes(pickle.dumps((status, *said)))


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(f"nemo_edo.{module}")
    import_bridge()
    serve(Connection(int(sys.argv[2])))
