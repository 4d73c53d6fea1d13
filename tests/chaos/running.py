"""Runs under way, forked (``helpers.forked``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from helpers import cli
from helpers.forked import Child
from helpers.ports import free_ports

from .jobs import KEY, Job

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
"""A run that has not ended by then hangs: long, for a machine that is busy with other things."""
GRACE_S = 30.0
"""What ranks have to end in once their neighbour has died, as torchrun gives them."""
POLL_S = 0.1
"""Each look at a run reads all processes of the machine: 4 ms of a core."""


class Running:
    """A job's processes."""

    def __init__(
        self, job: Job, folder: Path, urls: Sequence[str], *, pause: int = 0, command: Sequence[str] = (),
        before: Sequence[tuple] = (),
    ) -> None:
        """pause: the file operation before which the first rank stops; 0: none. command: another than the job's, by one
        process. before: what it calls first."""
        self.job = job
        ranks = 1 if command else job.ranks
        self._said, self._operations = tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()
        command = command or job.command(folder, urls)
        here_is = job.inputs(folder) if job.has_inputs else ROOT
        self._children: list[Child] = []
        here = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
        watch = ("tests.chaos.pauses:watch", str(folder), pause, self._operations.name)
        for rank in range(ranks):
            place = {**here, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            environment = {**KEY, **{name: str(value) for name, value in place.items()}}
            calls = [*before, watch] if rank == 0 else []
            self._children.append(
                Child(cli.run, command, calls, output=self._said.name, environment=environment, cwd=here_is)
            )
        self.ranks = [child.pid for child in self._children]
        self.statuses: dict[int, int] = {}
        """Of the ranks that have ended."""

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_) -> None:
        """Nothing of it is left, whatever has happened."""
        with contextlib.suppress(Hangs):
            self.kill()

    # --- what it does -----------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        return Path(self._said.name).read_text(errors="replace")

    @property
    def operations(self) -> int:
        return os.path.getsize(self._operations.name)

    def poll(self) -> bool:
        """Whether all its ranks have ended."""
        for place, rank in enumerate(self.ranks):
            status = self._children[place].wait()
            if status is not None:
                self.statuses[rank] = status
        return not self.alive()

    def alive(self) -> list[int]:
        """Ranks whose end is not known: the kernel may soon give the number of another to a new process."""
        return [rank for rank in self.ranks if rank not in self.statuses]

    def wait_for_pause(self) -> bool:
        """Whether the first rank stands still now; False: it has ended before."""

        def stands() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(self.ranks[0]).status() == psutil.STATUS_STOPPED
            return False

        self._until(lambda: self.poll() or stands())
        return not self.poll()

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[0], signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """All of the tree, the ranks first."""
        found = []
        for rank in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
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
        if not self.poll():
            self.send(signal.SIGTERM)
            with contextlib.suppress(Hangs):
                self._until(self.poll, GRACE_S)
            self.kill()
        _, left = psutil.wait_procs(list(family.values()), timeout=GRACE_S)
        if left:
            for process in left:
                process.kill()
            raise Hangs(f"it left processes behind: {left}\n{self.said}")
        return next((status for status in self.statuses.values() if status), 0)

    def send(self, number: int) -> None:
        """A signal to every rank."""
        for rank in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)

    def kill(self) -> None:
        """Returns once they have ended: a dying process still has its files and the folder's lock."""
        doomed = self.processes()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._until(self.poll, GRACE_S)
        psutil.wait_procs(doomed, timeout=GRACE_S)

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
                self._processes[place] = subprocess.Popen(command, stdout=subprocess.PIPE)
        for process in self._processes:
            if process.stdout is not None and not process.stdout.closed:
                process.stdout.readline()  # "ready"
                process.stdout.close()

    def serve(self, model: str) -> None:
        """All of them again, with another model."""
        self.close()
        self._state.write_text(json.dumps({"model": model}))
        self.start()

    def kill(self, places: Sequence[int]) -> None:
        for place in places:
            self._processes[place].kill()
            self._processes[place].wait()
            self._processes[place] = None

    def close(self) -> None:
        self.kill([place for place, process in enumerate(self._processes) if process is not None])
