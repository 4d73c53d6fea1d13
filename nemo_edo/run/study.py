"""A study: every cell of tasks x arms x doses x seeds, each once, by as many processes as wanted.

Each process runs cell after cell, since importing Megatron takes longer than a small training. A cell is claimed by a
lock on a file, so that further processes (another ``nemo-edo study run``, another machine on the same file system) may
join at any time; the lock ends with its process. The arms of a task and a seed share one warm-up. A finished cell is
in the study's table (``study_table``), and is not run again, whether or not its folder is still there.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import resolved_yaml
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError
from nemo_edo.evaluation.results import START
from nemo_edo.run.folder import CONFIG, JOURNAL, METRICS, RunFolder
from nemo_edo.run.study_file import Cell, Study
from nemo_edo.run.study_status import composed, unfinished
from nemo_edo.run.study_table import append_rows, cell_of, cell_rows, locked, read_rows, stopped_row

LOGS, CLAIMS = "logs", "claims"
WAIT_S = 1.0
"""Between two looks at a warm-up that another process trains."""
NOT_FOR_REPORTS = ("checkpoints", "rollouts", "base", "logs")
"""What ``keep: results`` removes from a cell's folder, and the responses of its evaluations."""
Say = Callable[[str], None]


def run_study(study: Study, *, jobs: int = 1, say: Say = print) -> int:
    """Runs the cells that are left, and returns how many there are at the end.

    Raises UserError for a config that cannot be run, before the first cell begins, and RunStopped where this process
    is asked to stop: what is finished is in the table, and the next run resumes the rest.
    """
    study.check()
    left = unfinished(study)
    say(f"{len(study.cells) - len(left)} of {len(study.cells)} cells are in {study.table}; {len(left)} are left")
    if left and jobs == 1:
        work(study, say)
    elif left:
        _in_processes(study, min(jobs, len(left)))
    return len(unfinished(study))


def work(study: Study, say: Say = print) -> None:
    """Runs cells until none is left that no other process has."""
    while True:
        waits = False
        for cell in unfinished(study):
            with _claimed(study, cell.name) as mine:
                if not mine or cell.key in {cell_of(row) for row in read_rows(study.table)}:
                    continue
                if not _start_is_ready(study, cell, say):
                    waits = True
                    continue
                _run_cell(study, cell, say)
                break
        else:
            if not waits:
                return
            time.sleep(WAIT_S)


def _in_processes(study: Study, jobs: int) -> None:
    """Fresh processes, since Megatron's platform changes one for good. They share the cores."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work_apart, args=(study,), name=f"study-{index}") for index in range(jobs)]
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except KeyboardInterrupt as interrupt:
        raise RunStopped(f"the study in {study.folder} was stopped") from interrupt
    finally:
        signal.signal(signal.SIGTERM, previous)
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            worker.join()
    failed = [worker.name for worker in workers if worker.exitcode]
    if failed:
        raise UserError(f"{', '.join(failed)} failed: the messages are above, and in {study.folder / LOGS}")


def _work_apart(study: Study) -> None:
    """``work`` in a separate process; the first process reports a stop."""
    with suppress(RunStopped):
        work(study)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _claimed(study: Study, name: str):
    return locked(study.folder / CLAIMS / f"{name}.lock", wait=False)


def _start_is_ready(study: Study, cell: Cell, say: Say) -> bool:
    """Whether the warm-up of the cell's task and seed is there, once this process has trained it, if no other does."""
    start = study.start(cell.task, cell.seed)
    if RunFolder(study.folder / start.name).is_finished:
        return True
    with _claimed(study, start.name) as mine:
        if mine and not RunFolder(study.folder / start.name).is_finished:
            _run_start(study, start, say)
        return mine


def _run_start(study: Study, start: Cell, say: Say) -> None:
    cfg, begun = composed(study, start), time.process_time()
    folder = _train(study, start, cfg)
    if start.key not in {cell_of(row) for row in read_rows(study.table)}:
        commit = _commit(folder)
        append_rows(study.table, cell_rows(start, folder, START, cfg, time.process_time() - begun, commit))
    say(f"{start.name}: {time.process_time() - begun:.0f} CPU s")


def _run_cell(study: Study, cell: Cell, say: Say) -> None:
    cfg, begun = composed(study, cell), time.process_time()
    folder, start = RunFolder(study.folder / cell.name), study.start(cell.task, cell.seed)
    if not folder.is_finished:
        adopt_start(RunFolder(study.folder / start.name), folder, resolved_yaml(cfg))
    [arm] = cfg.arms
    try:
        _train(study, cell, cfg)
    except StoppedByGuard as stopped:
        seconds, commit = time.process_time() - begun, _commit(RunFolder(study.folder / start.name))
        append_rows(study.table, [stopped_row(cell, cfg, seconds, commit, str(stopped))])
        say(f"{cell.name}: stopped by a guard: {stopped}")
        return
    rows = cell_rows(cell, folder, arm, cfg, time.process_time() - begun, _commit(folder))
    append_rows(study.table, rows)
    _tidy(folder, study.keep)
    last = rows[-1]
    say(f"{cell.name}: {last['cpu_seconds']} CPU s, accuracy {last['accuracy']}, vote {last['vote']}")


def _train(study: Study, cell: Cell, cfg: RunConfig) -> RunFolder:
    """Runs the cell unless its run has finished; what it prints is in its log."""
    folder = RunFolder(study.folder / cell.name)
    if not folder.is_finished:
        from nemo_edo.run import jobs

        with _logged(study.folder / LOGS / f"{cell.name}.log"):
            jobs.train(cfg, page=False)
    return folder


@contextmanager
def _logged(path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        yield


def adopt_start(start: RunFolder, target: RunFolder, config: str) -> None:
    """Makes a new run's folder of a finished warm-up with its evaluation, as if the run had been stopped after it.

    Nothing where the run has begun. Files of checkpoints and evaluations are never written again, so that links do.
    """
    if target.path.exists():
        return
    new = RunFolder(target.path.with_name(f".{target.path.name}.new"))
    shutil.rmtree(new.path, ignore_errors=True)  # of a process that was killed here
    whole = ("data", "base", f"checkpoints/{START}", f"evaluations/{START}")
    for name in whole:
        if (start.path / name).is_dir():
            shutil.copytree(start.path / name, new.path / name, copy_function=os.link)
    for name in (f"evaluations/{START}.json", f"test_time/{START}.json", f"samples/{START}.json", "kernels.json"):
        (new.path / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(start.path / name, new.path / name)
    journal = {stage: start.journal()[stage] for stage in ("files", START)}
    size = journal[START]["metrics_bytes"]
    (new.path / METRICS).write_bytes((start.path / METRICS).read_bytes()[:size])
    new.write_json(JOURNAL, journal)
    (new.path / CONFIG).write_text(config, encoding="utf-8")
    new.path.rename(target.path)


def _tidy(folder: RunFolder, keep: str) -> None:
    """Removes what the study does not keep of a finished cell."""
    if keep == "nothing":
        shutil.rmtree(folder.path)
    elif keep == "results":
        responses = [path for path in (folder.path / "evaluations").glob("*/*") if path.is_dir()]
        for path in (*(folder.path / name for name in NOT_FOR_REPORTS), *responses):
            shutil.rmtree(path, ignore_errors=True)


def _commit(folder: RunFolder) -> str:
    return folder.read_json("summary.json")["commit"] or ""
