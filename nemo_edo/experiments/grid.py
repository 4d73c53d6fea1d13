"""The runner of sweeps and studies: every cell of a grid is one training, in a separate process and folder.

A process, because Megatron's platform changes it for good, and what one run leaves in memory must not affect the next.
Cells are claimed by locks on files, which end with their process: several commands, on several machines with one file
system, may run a grid together. The first cell of a warm-up trains it; the others wait for it, and begin after it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

import yaml

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_run, resolved_yaml
from nemo_edo.errors import RunStopped
from nemo_edo.evaluation.results import START
from nemo_edo.experiments.grid_console import GridConsole
from nemo_edo.run.folder import CONFIG, JOURNAL, METRICS, RunFolder

POLL_SECONDS = 0.1
"""Between two looks at the processes."""
WAIT_SECONDS = 1.0
"""Between two looks at cells that wait for a warm-up, or that another command has."""
LOGS, CLAIMS = "logs", "claims"
AFTER_THE_WARM_UP = {
    *("name", "output_dir", "experiment", "algorithm", "grpo", "idpo", "arms", "replicate_baseline", "train"),
    *("search", "checkpoint", "early_stop", "profile", "cluster", "exp_manager"),
}
"""The sections that reach neither the warm-up nor its evaluation."""
ADOPTED = (
    *("data", "base", "kernels.json", f"checkpoints/{START}", f"evaluations/{START}", f"evaluations/{START}.json"),
    *(f"test_time/{START}.json", f"samples/{START}.json"),
)
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, several times as fast, where PyYAML was built with it."""


def train_command(config_name: str, overrides: Sequence[str], config_dir: str | None, processes: int) -> list[str]:
    """The command that trains a config with this interpreter, by torchrun where it takes several processes."""
    module = ["-m", "nemo_edo"]
    if processes > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *module]
    folder = ["--config-path", config_dir] if config_dir else []
    return [sys.executable, *module, "train", "--config-name", config_name, *folder, *overrides]


def quoted(text: str) -> str:
    """A text for Hydra's override grammar, whatever commas and equal signs are in it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return f"'{escaped}'"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training of a grid."""

    name: str
    """Its folder below the grid's."""
    config_name: str
    overrides: tuple[str, ...]
    """The command line after the config's name, ``name`` and ``output_dir`` included."""
    config_dir: str | None = None

    @cached_property
    def cfg(self) -> RunConfig:
        """The composed config, in half a second. Raises ConfigError."""
        return compose_run(self.config_name, list(self.overrides), self.config_dir)

    @cached_property
    def config(self) -> str:
        """The resolved config, as YAML."""
        return resolved_yaml(self.cfg)

    @cached_property
    def warm_up(self) -> str | None:
        """Equal for two cells whose warm-up, with its evaluation, is the same; None without one."""
        config = yaml.load(self.config, Loader=YAML_LOADER)
        if not config["sft"]["steps"]:
            return None
        reaching = {key: value for key, value in config.items() if key not in AFTER_THE_WARM_UP}
        return hashlib.sha256(json.dumps(reaching).encode()).hexdigest()[:16]

    def command(self, processes: int = 1) -> list[str]:
        return train_command(self.config_name, self.overrides, self.config_dir, processes)


class Grid:
    """The cells of a sweep or a study, and which of them are done."""

    folder: Path
    cells: Sequence[Cell]

    def run_folder(self, cell: Cell) -> RunFolder:
        return RunFolder(self.folder / cell.name)

    def log(self, cell: Cell) -> Path:
        return self.folder / LOGS / f"{cell.name}.log"

    def left(self) -> list[Cell]:
        """The cells that have to be trained, in their order."""
        return [cell for cell in self.cells if not self.run_folder(cell).is_finished]

    def donors(self, cell: Cell) -> list[Cell]:
        """The cells whose warm-up can be that of this one."""
        return [other for other in self.cells if other.warm_up == cell.warm_up]

    def record(self, cell: Cell, status: int, cpu_seconds: float) -> bool:
        """Takes note of a cell whose process has ended, and returns whether the cell is done. cpu_seconds: of the
        process and its children."""
        return status == 0


@dataclass(frozen=True)
class FailedCell:
    cell: Cell
    status: int
    log: Path


def run_grid(grid: Grid, *, jobs: int = 1, processes: int = 1, say: Callable[[str], None] = print) -> list[FailedCell]:
    """Runs the cells that are left, ``jobs`` at a time, and returns those that failed. processes: of torchrun, each.

    A failure stops no other cell. Raises RunStopped where this process is stopped (SIGTERM, or Ctrl-C): the cells in
    training are asked to stop and waited for, and the same command resumes from there.
    """
    (grid.folder / CLAIMS).mkdir(parents=True, exist_ok=True)
    (grid.folder / LOGS).mkdir(exist_ok=True)
    left = grid.left()
    finished = len(grid.cells) - sum(cell in left for cell in grid.cells)
    runner = _Runner(grid, left, jobs, processes, GridConsole(finished + len(left), finished, jobs, say))
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        runner.run()
    except KeyboardInterrupt as interrupt:
        raise RunStopped(f"the runs in {grid.folder} were stopped") from interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
        runner.close()
    return runner.failures


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@dataclass
class _Training:
    """A cell in training. Its claims end where their files are closed."""

    cell: Cell
    process: subprocess.Popen
    claim: IO
    warm_up: IO | None
    """The claim of the warm-up that it trains."""


@dataclass
class _Runner:
    grid: Grid
    waiting: list[Cell]
    jobs: int
    processes: int
    console: GridConsole
    running: list[_Training] = field(default_factory=list)
    failures: list[FailedCell] = field(default_factory=list)

    def run(self) -> None:
        blocked, looked = self._start_more(), time.monotonic()
        while self.running or blocked:
            time.sleep(POLL_SECONDS)
            self.console.look()
            if self._reap() or time.monotonic() - looked >= WAIT_SECONDS:
                blocked, looked = self._start_more(), time.monotonic()

    def close(self) -> None:
        self.console.close()
        for training in self.running:
            training.process.terminate()
        for training in self.running:
            training.process.wait()

    def _start_more(self) -> bool:
        """Starts cells as far as there is room. Returns whether a cell waits for a warm-up."""
        busy = set()  # warm-ups in training
        for cell in list(self.waiting):
            if len(self.running) >= self.jobs:
                break
            if cell.warm_up in busy:
                continue
            claim = hold(self.grid.folder / CLAIMS / f"{cell.name}.lock")
            if claim is None:  # another command has it
                continue
            if cell not in self.grid.left():  # another command has finished it
                self.waiting.remove(cell)
                claim.close()
            elif not self._start(cell, claim):
                busy.add(cell.warm_up)
                claim.close()
        return bool(busy)

    def _start(self, cell: Cell, claim: IO) -> bool:
        """Starts the cell, after another's warm-up where one is finished; False where that is still in training."""
        folder, warm_up, donor = self.grid.run_folder(cell), None, None
        if cell.warm_up is not None and START not in folder.journal():
            warm_up = hold(self.grid.folder / CLAIMS / f"warm-up {cell.warm_up}.lock")
            if warm_up is None:
                return False
            donor = None if folder.path.exists() else self._donor(cell)
            if donor is not None:
                adopt_warm_up(self.grid.run_folder(donor), folder, cell.config)
        self.console.started(cell.name, self.grid.log(cell), donor and donor.name)
        self.running.append(_Training(cell, self._process(cell), claim, warm_up))
        self.waiting.remove(cell)
        return True

    def _donor(self, cell: Cell) -> Cell | None:
        """A cell that has finished the warm-up, and still has its files."""
        for other in self.grid.donors(cell):
            folder = self.grid.run_folder(other)
            if START in folder.journal() and folder.checkpoint(START).is_dir():
                return other
        return None

    def _process(self, cell: Cell) -> subprocess.Popen:
        environment = dict(os.environ)
        if self.jobs > 1:  # otherwise each process would start a thread on every core
            threads = max(1, len(os.sched_getaffinity(0)) // (self.jobs * self.processes))
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        with self.grid.log(cell).open("a", encoding="utf-8") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(cell.command(self.processes), env=environment, **streams)

    def _reap(self) -> bool:
        """Takes note of processes that have ended and of finished warm-ups; whether there were any."""
        news = False
        for training in list(self.running):
            cell, before = training.cell, _cpu_seconds_of_children()
            status = training.process.poll()
            if status is not None:
                news = True
                self.running.remove(training)
                if not self.grid.record(cell, status, _cpu_seconds_of_children() - before):
                    self.failures.append(FailedCell(cell, status, self.grid.log(cell)))
                self.console.ended(cell.name, status)
                training.claim.close()
            if training.warm_up and (status is not None or START in self.grid.run_folder(cell).journal()):
                news = True
                training.warm_up.close()
                training.warm_up = None
        return news


def _cpu_seconds_of_children() -> float:
    """Of those that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def hold(path: Path, *, wait: bool = False) -> IO | None:
    """The file with its lock, which lasts until it is closed or the process ends; None where another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def adopt_warm_up(source: RunFolder, target: RunFolder, config: str) -> None:
    """Makes the folder of a run that has not begun, as if it had been stopped right after the source's warm-up and
    its evaluation. Their files are never written again once they are there, so that links do."""
    new = RunFolder(target.path.with_name(f".{target.path.name}.new"))
    shutil.rmtree(new.path, ignore_errors=True)  # of a process that was killed here
    for name in ADOPTED:
        there, here = source.path / name, new.path / name
        here.parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.copytree(there, here, copy_function=os.link)
        elif there.is_file():
            os.link(there, here)
    journal = {stage: notes for stage, notes in source.journal().items() if stage in ("files", START)}
    size = journal[START]["metrics_bytes"]
    (new.path / METRICS).write_bytes((source.path / METRICS).read_bytes()[:size])
    new.write_json(JOURNAL, journal)
    (new.path / CONFIG).write_text(config, encoding="utf-8")
    new.path.rename(target.path)
