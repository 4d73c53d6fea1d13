"""Files that a resumed run or a reader still needs, checked when the run resumes, before any work."""

from __future__ import annotations

import warnings
from pathlib import Path

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS, kinds, load_evaluation
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.early_stop import early_stop, trained_iterations
from nemo_edo.run.folder import RESTORE, RunFolder
from nemo_edo.run.settings import RunSettings


def check_stage(settings: RunSettings, folder: RunFolder, name: str) -> None:
    """Raises UserError where a policy or a result of a finished stage is missing or damaged, and warns
    of responses that are."""
    if settings.trains:
        _check_checkpoint(folder.checkpoint(name))
    check_trained(settings, folder, name, final=True)


def check_trained(settings: RunSettings, folder: RunFolder, name: str, *, final: bool = False) -> None:
    """``check_arm`` of an arm that has been trained to its end, be it early: then the evaluation there is done, too."""
    stop = early_stop(settings.early_stop, folder, name)
    trained = trained_iterations(settings, folder, name)
    check_arm(settings, folder, name, trained, is_within=stop is not None, final=final)


def check_arm(
    settings: RunSettings,
    folder: RunFolder,
    name: str,
    iteration: int,
    *,
    is_within: bool = False,
    final: bool = False,
) -> None:
    """``check_stage`` of what an arm has left before it resumes at an iteration (within it: at a step of it, so that
    its evaluation is done), final: and of its end."""
    done = evaluated(settings, name, iteration + is_within)
    for path in [folder.evaluation(name), folder.test_time(name)] if final else []:
        load_evaluation(path)
    for t in done:
        load_evaluation(folder.evaluation(name, t))
    for best in folder.best_checkpoints(name):
        _check_checkpoint(best)
    rollouts = RolloutStore(folder.rollouts(name))
    of_rollouts = range(iteration) if name in settings.arms else ()
    if of_rollouts and iteration < settings.arms[name].iterations:
        explored = settings.arms[name].explored_iteration(iteration + is_within)
        for path in rollouts.lost({explored} & set(range(iteration + is_within))):
            raise UserError(f"{path} is missing or damaged, and the exploration term runs over it; {RESTORE}")
    lost = rollouts.lost(of_rollouts)
    for kind in kinds(settings.evaluation, final=final):
        at = [*(done if kind in KINDS else ()), *([settings.final_iteration(name)] if final else [])]
        lost += RolloutStore(folder.evaluated(name, kind)).lost(at)
    for path in lost:
        warnings.warn(
            f"{path} is missing or damaged; training and results no longer need it; restore it from a copy if you do",
            stacklevel=2,
        )


def evaluated(settings: RunSettings, name: str, before: int) -> list[int]:
    """The iterations below ``before`` with a short evaluation."""
    every = settings.evaluation.every
    return [t for t in range(before) if t % every == 0] if every and name in settings.arms else []


def _check_checkpoint(folder: Path) -> None:
    from nemo_edo.megatron.checksums import DamagedCheckpoint
    from nemo_edo.worker.dispatch import workers
    from nemo_edo.worker.worker import Worker

    try:
        workers().call(Worker.check_checkpoint, folder)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; {RESTORE}") from error
