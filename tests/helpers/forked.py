"""Processes of the standard library's fork server, which has imported everything (``helpers.preloaded``)."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["helpers.preloaded"])
NEW = multiprocessing.get_context("spawn")
"""For processes that import everything anew, under another environment."""
_lock = threading.Lock()
"""multiprocessing polls the processes of other threads as it starts one, and whoever polls second loses the status."""


class Child:
    """A process, in its own session, that calls ``function(*arguments)`` and ends with the returned status."""

    def __init__(
        self, function: Callable[..., int], *arguments: object, output: str | Path, errors: str | Path | None = None,
        cwd: Path | None = None, environment: Mapping[str, str] | None = None, context=FORK,
    ) -> None:
        """output, errors: files to append to; environment: additions to this process's."""
        files = str(output), str(errors or output)
        run = function, arguments, files, cwd or Path.cwd(), dict(environment or {})
        self._process = context.Process(target=_run, args=run)
        with _lock:
            self._process.start()
        self.pid = self._process.pid

    def wait(self, limit_s: float = 0.0) -> int | None:
        """Its exit status, negative after a signal; None where it has not ended within the limit."""
        multiprocessing.connection.wait([self._process.sentinel], limit_s)
        with _lock:
            return self._process.exitcode

    def kill(self) -> None:
        """With all that it has started in its session, such as the writers of a checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with _lock:
            self._process.kill()  # it may not have reached its session yet
            self._process.join()


def _run(function: Callable, arguments: tuple, files: tuple[str, str], cwd: Path, environment: dict) -> None:
    os.setsid()
    # The kernel kills this session once the process that has asked for it ends, and so its end of this pipe is closed.
    # (The fork server is no sign of it: it lives as long as its processes do.)
    sentinel = multiprocessing.parent_process().sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, os.O_ASYNC)
    for standard, path in zip((1, 2), files, strict=True):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), standard)
    os.environ.update(environment)
    os.chdir(cwd)
    status: int | str | None = 1
    try:
        status = function(*arguments)
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # as the interpreter does with what nobody catches
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if isinstance(status, str) else status or 0)
