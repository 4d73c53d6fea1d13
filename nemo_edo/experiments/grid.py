"""The runner of sweeps and studies: every cell of a grid is one training, in a separate process and folder.

Megatron's platform changes a process for good, and what one run leaves in memory must not affect the next. Locks on
files say which command trains a cell, and end with their process: several commands, on several machines with one file
system, may run a grid together. The first cell of a warm-up trains it; the others wait for it, and adopt it.
"""

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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_run, resolved_yaml
from nemo_edo.config.run import START
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.run_folder import CONFIG, EVALUATED_AGAIN, JOURNAL, METRICS, WARNINGS, RunFolder
from nemo_edo.utils.owned_file import InUse, OwnedFile
from nemo_edo.utils.processes import end_with
from nemo_edo.utils.status_line import StatusLine
from nemo_edo.utils.wording import clock_time

POLL_SECONDS = 0.1
"""How often the processes are looked at."""
WAIT_SECONDS = 1.0
"""How often cells are looked at that wait for a warm-up, or that another command trains."""
LOGS, CLAIMS = "logs", "claims"
LAST_BYTES = 8192
"""The part of a cell's log in which its last line is looked for."""
_OF_A_RUN = re.compile(r"^\[\d+/\d+\] .*", re.MULTILINE)
_OF_AN_EVALUATION = re.compile(r"^\[\d+/\d+\] (\S+) after \d+: (.*)", re.MULTILINE)
AFTER_THE_WARM_UP = {
    *("name", "output_dir", "experiment", "algorithm", "grpo", "idpo", "arms", "replicate_baseline", "train"),
    *("search", "checkpoint", "early_stop", "profile", "cluster", "exp_manager", "allow_changed"),
}
"""Sections of the config that reach neither the warm-up nor its evaluation."""
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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training of a grid."""

    name: str
    """The cell's folder below the grid's."""
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
        if not self.cfg.sft.steps:
            return None
        return hashlib.sha256(json.dumps(_settings(self.config)).encode()).hexdigest()[:16]

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
        """The cells whose warm-up this one can adopt."""
        return [other for other in self.cells if other.warm_up == cell.warm_up]

    def record(self, cell: Cell, status: int, cpu_seconds: float) -> bool:
        """Notes that a cell's process has ended, with the CPU time of it and its children; whether the cell is done."""
        return status == 0


@dataclass(frozen=True)
class FailedCell:
    cell: Cell
    status: int
    log: Path


def run_grid(grid: Grid, *, jobs: int = 1, processes: int = 1) -> list[FailedCell]:
    """Trains the cells that are left, ``jobs`` at a time, and returns those that failed. processes: of torchrun, each.

    A failure stops no other cell. Raises RunStopped where this process is stopped (SIGTERM, or Ctrl-C): the cells in
    training are asked to stop and waited for, and the same command resumes from there.
    """
    (grid.folder / LOGS).mkdir(parents=True, exist_ok=True)
    runner = _Runner(grid, jobs, processes)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # both stops raise KeyboardInterrupt
    try:
        runner.run()
    except KeyboardInterrupt as interrupt:
        raise RunStopped(f"the runs in {grid.folder} were stopped") from interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
        runner.close()
    return runner.failures


@dataclass
class _Training:
    """A cell in training. Its locks end where their files are closed."""

    cell: Cell
    process: subprocess.Popen
    begun: float
    lock: OwnedFile
    warm_up_lock: OwnedFile | None
    """Held until the warm-up that this cell trains is finished."""


class _Runner:
    """Prints a line where a cell starts and one where it ends, with its last numbers and the time left; on a terminal
    also the last line of each cell in progress."""

    def __init__(self, grid: Grid, jobs: int, processes: int) -> None:
        self.grid, self.jobs, self.processes = grid, jobs, processes
        self.waiting = grid.left()
        self.finished = sum(cell not in self.waiting for cell in grid.cells)
        """Cells that finished earlier."""
        self.total = self.finished + len(self.waiting)
        self.running: list[_Training] = []
        self.failures: list[FailedCell] = []
        self.durations: list[float] = []
        self.line = StatusLine()

    def run(self) -> None:
        if self.finished:
            print(f"{self.finished} of {self.total} runs finished earlier", flush=True)
        blocked, looked = self._start_cells(), time.monotonic()
        while self.running or blocked:
            time.sleep(POLL_SECONDS)
            if self._note_ends() or time.monotonic() - looked >= WAIT_SECONDS:
                blocked, looked = self._start_cells(), time.monotonic()
                if self.line.is_possible:
                    ends = {one.cell.name: _OF_A_RUN.findall(_end_of(self.grid.log(one.cell))) for one in self.running}
                    self.line.show("\n".join(f"{name}: {(end or ['starting'])[-1]}" for name, end in ends.items()))

    def close(self) -> None:
        """Asks the cells in training to stop, and waits. One of them may just have finished."""
        self.line.close()
        for training in self.running:
            training.process.terminate()
        try:
            while self.running:
                self._note_ends()
                time.sleep(POLL_SECONDS)
        finally:
            for training in self.running:
                training.process.wait()

    def _start_cells(self) -> bool:
        """Starts cells as far as there is room, and returns whether one waits for a warm-up in training."""
        busy, locks = set(), self.grid.folder / CLAIMS
        for cell in list(self.waiting):
            if len(self.running) >= self.jobs:
                break
            lock = hold(locks / f"{cell.name}.lock") if cell.warm_up not in busy else None
            if lock is None:
                continue
            if cell not in self.grid.left() or self._is_recorded_now(cell):  # another command has finished it
                self.waiting.remove(cell)
                lock.close()
                continue
            folder, log, shared, warm_up_lock = self.grid.run_folder(cell), self.grid.log(cell), "", None
            if cell.warm_up is not None and START not in folder.journal():
                warm_up_lock = hold(locks / f"warm-up {cell.warm_up}.lock")
                if warm_up_lock is None:
                    busy.add(cell.warm_up)
                    lock.close()
                    continue
                if not folder.path.exists():
                    sources = ((other, self.grid.run_folder(other)) for other in self.grid.donors(cell))
                    kept = (one for one in sources if _has_warm_up_of(one[1], cell.config))
                    donor, source = next(kept, (None, None))
                    if donor is not None:
                        adopt_warm_up(source, folder, cell.config)
                        shared = f", with the warm-up of {donor.name}"
            environment = dict(os.environ)
            if self.jobs > 1:  # otherwise each process would start a thread on every core
                threads = max(1, len(os.sched_getaffinity(0)) // (self.jobs * self.processes))
                environment.setdefault("OMP_NUM_THREADS", str(threads))
            with log.open("a", encoding="utf-8") as out:
                streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
                ends = partial(end_with, os.getpid())  # where this command is killed, its locks end, too
                process = subprocess.Popen(cell.command(self.processes), env=environment, preexec_fn=ends, **streams)
            self.running.append(_Training(cell, process, time.monotonic(), lock, warm_up_lock))
            self.waiting.remove(cell)
            place = self.finished + len(self.durations) + len(self.running)
            print(f"[{place}/{self.total}] {cell.name}{shared}: see {log}", flush=True)
        return bool(busy)

    def _is_recorded_now(self, cell: Cell) -> bool:
        """Records a cell whose run has finished, where a command was killed before it did. A run that lacks a result is
        not recorded: it is trained again."""
        folder = self.grid.run_folder(cell)
        if not folder.is_finished or not _has_config(folder, cell.config, ("name", "output_dir")):
            return False
        try:
            is_recorded = self.grid.record(cell, 0, 0.0)
        except UserError:
            return False
        self.finished += is_recorded
        return is_recorded

    def _note_ends(self) -> bool:
        """Notes which processes have ended and which warm-ups are finished; whether there were any."""
        news = False
        for training in list(self.running):
            cell, before = training.cell, resource.getrusage(resource.RUSAGE_CHILDREN)
            status = training.process.poll()  # which adds an ended process to the usage of the children
            if status is not None:
                news = True
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                log = self.grid.log(cell)
                if not self.grid.record(cell, status, cpu_seconds):
                    self.failures.append(FailedCell(cell, status, log))
                self.running.remove(training)  # only now: where a stop comes before, ``close`` records it
                self.durations.append(time.monotonic() - training.begun)
                ended = {0: "finished", os.EX_TEMPFAIL: "stopped"}
                outcome = ended.get(status, f"failed with status {status}")
                parts = [f"{cell.name}: {outcome} after {self.durations[-1] / 60:.1f} min"]
                means = dict(_OF_AN_EVALUATION.findall(_end_of(log)))
                if means and not status:
                    parts.append(" ".join(list(means.items())[-1]))
                if left := self.total - self.finished - len(self.durations):
                    mean = sum(self.durations) / len(self.durations)
                    parts.append(f"{left} left, ~{clock_time(mean * left / min(self.jobs, left))}")
                print("; ".join(parts), flush=True)
                training.lock.close()
            if training.warm_up_lock and (status is not None or START in self.grid.run_folder(cell).journal()):
                news = True
                training.warm_up_lock.close()
                training.warm_up_lock = None
        return news


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - LAST_BYTES, 0))
        return file.read().decode(errors="replace")


def hold(path: Path, *, wait: bool = False) -> OwnedFile | None:
    """The file, which belongs to this process until it is closed; None where it belongs to another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            return OwnedFile(path)
        except InUse:
            if not wait:
                return None
            time.sleep(0.1)


def _settings(config: str, besides: Collection[str] = AFTER_THE_WARM_UP) -> dict[str, Any]:
    """A config without some sections: those that reach neither the warm-up nor its evaluation."""
    return {key: one for key, one in yaml.load(config, Loader=YAML_LOADER).items() if key not in besides}


def _has_config(source: RunFolder, config: str, besides: Collection[str]) -> bool:
    """Whether a folder's run has the settings of a config, but for sections that do not count."""
    there, here = (_settings(one, besides) for one in ((source.path / CONFIG).read_text(encoding="utf-8"), config))
    model = here.get("model", {})
    if "seq_length" in model and model["seq_length"] is None:  # follows from the data; the folder has what it became
        model["seq_length"] = there["model"]["seq_length"]
    return there == here


def _has_warm_up_of(source: RunFolder, config: str) -> bool:
    """Whether a folder has the warm-up of a config, finished: with the settings that it was made with, and evaluated
    with them alone."""
    notes = source.journal().get(START, {EVALUATED_AGAIN: True})
    if notes.get(EVALUATED_AGAIN) or not source.checkpoint(START).is_dir():
        return False
    return _has_config(source, config, AFTER_THE_WARM_UP)


def link(there: str | Path, here: str | Path) -> None:
    """A copy where the file system has no links."""
    try:
        os.link(there, here)
    except OSError:
        shutil.copy2(there, here)


def adopt_warm_up(source: RunFolder, target: RunFolder, config: str) -> None:
    """Makes the folder of a run that has not begun, as if it had been stopped right after the source's warm-up and
    its evaluation. Their files are never written again once they are there, so that links do."""
    new = RunFolder(target.path.with_name(f".{target.path.name}.new"))
    shutil.rmtree(new.path, ignore_errors=True)  # of a process that was killed here
    for name in ADOPTED:
        there, here = source.path / name, new.path / name
        here.parent.mkdir(parents=True, exist_ok=True)
        if there.is_dir():
            shutil.copytree(there, here, copy_function=link)
        elif there.is_file():
            link(there, here)
    if (said := source.path / WARNINGS).is_file():
        lines = said.read_text(encoding="utf-8").splitlines(keepends=True)
        of_warm_up = [line for line in lines if line.startswith(f'{{"arm": "{START}"') and line.endswith("}\n")]
        (new.path / WARNINGS).write_text("".join(of_warm_up), encoding="utf-8")
    journal = {stage: notes for stage, notes in source.journal().items() if stage in ("files", START)}
    noted = journal["files"].get("inputs", {})
    journal["files"]["inputs"] = {key: one for key, one in noted.items() if key.split(".")[0] not in AFTER_THE_WARM_UP}
    size = journal[START]["metrics_bytes"]
    (new.path / METRICS).write_bytes((source.path / METRICS).read_bytes()[:size])
    new.write_json(JOURNAL, journal)
    (new.path / CONFIG).write_text(config, encoding="utf-8")
    new.path.rename(target.path)
