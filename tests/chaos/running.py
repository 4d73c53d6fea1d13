"""Runs under way: forked from this process, which has imported everything, or started by torchrun."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from helpers.cli import IMPORTED, run, start
from helpers.ports import free_ports

from nemo_edo.utils.processes import end_with

from .jobs import KEY, Job

LIMIT_S = 900.0
"""A run that has not ended by then hangs: long, for a machine that is busy with other things."""
GRACE_S = 30.0
"""What torchrun gives to ranks whose neighbour has died."""
POLL_S = 0.01


def warm_up() -> None:
    """Imports what a run needs, and adapts Megatron to the machine, once for all forks."""
    os.environ |= KEY
    for module in (*IMPORTED, "run.own_advantages", "generation.server_engine", "rewards.custom"):
        importlib.import_module(f"nemo_edo.{module}")
    from nemo_edo.megatron import platform

    platform.enter(1)
    gc.collect()
    gc.freeze()  # forks need not look at it again


class Running:
    """A job's processes."""

    def __init__(self, job: Job, folder: Path, urls: Sequence[str], *, pause: int = 0, clock: float = 0.0) -> None:
        """pause: the file operation before which the first rank stops; 0: none."""
        self.job = job
        self._said = tempfile.TemporaryFile("a+b")
        self._operations = tempfile.TemporaryFile("a+b")
        command = job.command(folder, urls)
        if job.by_torchrun:
            launcher = start(*command, processes=job.ranks, stdout=self._said, stderr=self._said)
            self._open = {launcher.pid: None}
        else:
            port = free_ports(1)[0] if job.ranks > 1 else 0
            self._open = {self._fork(job, rank, port, command, folder, pause, clock): None for rank in range(job.ranks)}
        self.main, *_ = self.ranks = list(self._open)
        self.statuses: dict[int, int] = {}
        self._family = {self.main}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_) -> None:
        """Nothing of it is left, whatever has happened."""
        self.kill()
        with contextlib.suppress(Hangs):
            self._until(self.poll, GRACE_S)

    def _fork(
        self, job: Job, rank: int, port: int, command: list[str], folder: Path, pause: int, clock: float
    ) -> int:
        parent, child = os.getpid(), os.fork()
        if child:
            return child
        end_with(parent)
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port} if job.ranks > 1 else {}  # fmt: skip
        before = [("helpers.cli:export", {name: str(value) for name, value in here.items()})]
        if rank == 0:
            before.append(("tests.chaos.pauses:watch", str(folder), pause, self._operations.fileno(), clock))
        run(command, Path.cwd(), before, (self._said.fileno(), self._said.fileno()))

    # --- what it does -----------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    @property
    def operations(self) -> int:
        return os.fstat(self._operations.fileno()).st_size

    def poll(self) -> bool:
        """Whether all its ranks have ended."""
        for pid in list(self._open):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._open[pid]
                self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return not self._open

    def wait_for_pause(self) -> bool:
        """Whether the first rank stands still now; False: it has ended before."""
        self._until(lambda: self.poll() or psutil.Process(self.main).status() == psutil.STATUS_STOPPED)
        return bool(self._open)

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.main, signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """All of the tree, the ranks first."""
        found = []
        for rank in self._open:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank)
                found += [process, *process.children(recursive=True)]
        return found

    def finish(self) -> int:
        """Waits for the end, as torchrun does: once a rank has failed, the others are ended. Returns the first rank's
        status. Raises Hangs where it does not end, or leaves processes behind."""
        family = {process.pid: process for process in self.processes()}

        def ended() -> bool:
            family.update({process.pid: process for process in self.processes()})
            return self.poll() or any(self.statuses.values())

        self._until(ended)
        if self._open:
            for pid in self._open:
                os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(Hangs):
                self._until(self.poll, GRACE_S)
            self.kill()
            self._until(self.poll)
        _, left = psutil.wait_procs(list(family.values()), timeout=GRACE_S)
        if left:
            for process in left:
                process.kill()
            raise Hangs(f"it left processes behind: {left}\n{self.said}")
        return next((status for status in self.statuses.values() if status), 0)

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _until(self, true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                raise Hangs(f"it has not ended after {limit_s:g} s\n{self.said}")
            time.sleep(POLL_S)


class Hangs(AssertionError):
    """A run waits for something that will not come."""


class Servers:
    """A job's scripted servers, each at the same address whenever it is started."""

    def __init__(self, count: int, folder: Path) -> None:
        self._state = folder / "servers.json"
        self._ports = free_ports(count)
        self._processes: list[subprocess.Popen | None] = [None] * count
        self.start()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def start(self) -> None:
        """Those that do not run."""
        for place, port in enumerate(self._ports):
            if self._processes[place] is None:
                command = [sys.executable, "-m", "helpers.completions_server", str(port), str(self._state)]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                self._processes[place] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        for process in self._processes:
            if process.stdout is not None and not process.stdout.closed:
                process.stdout.readline()  # "ready"
                process.stdout.close()

    def kill(self, places: Sequence[int]) -> None:
        for place in places:
            self._processes[place].kill()
            self._processes[place].wait()
            self._processes[place] = None

    def close(self) -> None:
        self.kill([place for place, process in enumerate(self._processes) if process is not None])
