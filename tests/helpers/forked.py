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
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

FORK = multiprocessing.get_context("forkserver")
_servers: dict[frozenset, forkserver.ForkServer] = {}
"""By the environment variables, besides this process's, that they have imported everything under."""
_lock = threading.Lock()
"""multiprocessing polls the processes of other threads as it starts one, and whoever polls second loses the status."""


class Child:
    """A process, in its own session, that calls ``function(*arguments)`` and ends with the returned status."""

    def __init__(
        self, function: Callable[..., int], *arguments: object, output: str | Path, errors: str | Path | None = None,
        cwd: Path | None = None, environment: Mapping[str, str] | None = None,
        imported_under: Mapping[str, str] | None = None,
    ) -> None:
        """output, errors: files to append to; environment: additions to this process's; imported_under: those that
        are there before anything is imported."""
        files = str(output), str(errors or output)
        run = function, arguments, files, cwd or Path.cwd(), dict(environment or {})
        self._process = FORK.Process(target=_run, args=run)
        variables = dict(imported_under or {})
        with _lock, mock.patch.dict(os.environ, variables):  # with which a server starts
            server = _servers.setdefault(frozenset(variables.items()), forkserver.ForkServer())
            server.set_forkserver_preload(["helpers.preloaded"])
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
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
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # multiprocessing has put the parent's path in its place
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
