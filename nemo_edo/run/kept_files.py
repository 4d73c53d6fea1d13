"""Files that a resumed run or a reader still needs, checked when the run resumes, before any work."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import NONE
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS, kinds, load_evaluation
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.early_stop import early_stop, trained_iterations
from nemo_edo.run.folder import RESTORE
from nemo_edo.run.stored_run import final_iteration

if TYPE_CHECKING:
    from nemo_edo.run.stages import Job


def check_stage(job: Job, name: str) -> None:
    """Raises UserError where a policy or a result of a finished stage is missing or damaged, and warns
    of responses that are."""
    if job.cfg.algorithm != NONE:
        _check_checkpoint(job.folder.checkpoint(name))
    check_trained(job, name, final=True)


def check_trained(job: Job, name: str, *, final: bool = False) -> None:
    """``check_arm`` of an arm that has been trained to its end, be it early: then the evaluation there is done, too."""
    stop = early_stop(job.cfg, job.folder, name)
    trained = trained_iterations(job.cfg, job.folder, name)
    check_arm(job, name, trained, is_within=stop is not None, final=final)


def check_arm(job: Job, name: str, iteration: int, *, is_within: bool = False, final: bool = False) -> None:
    """``check_stage`` of what an arm has left before it resumes at an iteration (within it: at a step of it, so that
    its evaluation is done), final: and of its end."""
    done = evaluated(job, name, iteration + is_within)
    short = [job.folder.evaluation(name, t) for t in done]
    final_results = [job.folder.evaluation(name), job.folder.test_time(name)] if final else []
    _check_results([*final_results, *short])
    for best in job.folder.best_checkpoints(name):
        _check_checkpoint(best)
    of_rollouts = range(iteration) if name in job.arms else ()
    if of_rollouts and iteration < job.arms[name].iterations:
        _check_explored(job, name, iteration + is_within)
    number = final_iteration(job.cfg, name) if final else None
    _warn_of_lost_responses(job, name, of_rollouts, done, number)


def evaluated(job: Job, name: str, before: int) -> list[int]:
    """The iterations below ``before`` with a short evaluation."""
    every = job.cfg.evaluation.every
    return [t for t in range(before) if t % every == 0] if every and name in job.arms else []


def _check_checkpoint(folder: Path) -> None:
    from nemo_edo.megatron.checksums import DamagedCheckpoint
    from nemo_edo.worker.dispatch import workers
    from nemo_edo.worker.worker import Worker

    try:
        workers().call(Worker.check_checkpoint, folder)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; {RESTORE}") from error


def _check_results(paths: Iterable[Path]) -> None:
    for path in paths:
        load_evaluation(path)


def _check_explored(job: Job, name: str, iteration: int) -> None:
    """Raises UserError where the responses of an earlier iteration, over which the exploration term of this and later
    ones runs, are missing or damaged."""
    explored = job.arms[name].explored_iteration(iteration)
    for path in RolloutStore(job.folder.rollouts(name)).lost({explored} & set(range(iteration))):
        raise UserError(f"{path} is missing or damaged, and the exploration term runs over it; {RESTORE}")


def _warn_of_lost_responses(
    job: Job, name: str, rollouts: Iterable[int], short: Iterable[int], final: int | None
) -> None:
    """Nothing in the run reads the stored responses of earlier iterations and evaluations again. short, final: the
    iterations of the evaluations that are done."""
    lost = RolloutStore(job.folder.rollouts(name)).lost(rollouts)
    for kind in kinds(job.cfg.evaluation, final=final is not None):
        done = [*(short if kind in KINDS else ()), *([] if final is None else [final])]
        lost += RolloutStore(job.folder.evaluated(name, kind)).lost(done)
    for path in lost:
        warnings.warn(
            f"{path} is missing or damaged; training and results no longer need it; restore it from a copy if you do",
            stacklevel=2,
        )
