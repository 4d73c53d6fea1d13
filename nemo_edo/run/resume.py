"""Checkpoints that a killed run resumes from."""

import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.services import Position, Progress
from nemo_edo.data.batching import read_batch, write_batch
from nemo_edo.errors import DamagedCheckpoint, RunStopped, StoppedByGuard, UserError
from nemo_edo.megatron import checkpoint
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.services import RunServices
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.files import checksum
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker

DAMAGED = ".damaged"
"""What the name of a checkpoint ends with that was found damaged."""


class SavedProgress(Progress):
    """Checkpoints in a folder: ``step_00000120`` and so on, each with the optimizer's state, and
    ``batch_00003.safetensors``, what iteration 3 trains on.

    A checkpoint's name counts the optimizer steps before it. Its notes have the position, where metrics.jsonl ended
    at that time and, within an iteration, the checksum of the batch.
    """

    def __init__(
        self,
        run: RunServices,
        model: RemotePolicy,
        stage: str,
        *,
        keeps_reference: bool = False,
        rollouts: RolloutStore | None = None,
    ) -> None:
        """rollouts: the stage's own; within an iteration, it resumes only where they can still be read.
        keeps_reference: whether the model's reference moves in a way that cannot be recomputed (ema)."""
        self.folder = run.folder.progress(stage)
        self.start = Position()
        self.metrics_mark: dict[str, Any] | None = None
        """Where metrics.jsonl ended at ``start``; None where there was no checkpoint to resume from."""
        self._run, self._model, self._stage = run, model, stage
        self._config = run.cfg.checkpoint
        self._keeps_reference = keeps_reference
        self._rollouts = rollouts
        self._collected: Collected | None = None
        self._is_writing = False
        self._batch: dict[str, Any] | None = None
        """File name and checksum of the current iteration's batch on disk."""
        self._saved_at = 0

    # --- resuming --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Loads the newest checkpoint that is whole, with its batch, into the model and sets ``start``. Where all are
        damaged, model and ``start`` stay at the beginning. Damaged ones are renamed, with a warning, and removed once
        another is written."""
        for folder in self._checkpoints()[::-1]:
            try:
                self._load(folder)
            except DamagedCheckpoint as error:
                warnings.warn(f"{error}; resuming from before it", stacklevel=2)
                aside = folder.with_name(folder.name + DAMAGED)  # otherwise it would pass for the newest again
                shutil.rmtree(aside, ignore_errors=True)  # of the same step, damaged before
                folder.rename(aside)
            else:
                return

    def _load(self, folder: Path) -> None:
        workers = self._model.workers
        workers.call(Worker.check_checkpoint, folder)
        notes = checkpoint.load_extra(folder)
        if notes["batch"] is not None:
            # Within an iteration: without its batch and its rollouts the run would end without noticing.
            batch = self.folder / notes["batch"]["file"]
            if not batch.is_file():
                raise DamagedCheckpoint(f"{batch} is missing")
            if checksum(batch) != notes["batch"]["checksum"]:
                raise DamagedCheckpoint(f"{batch} has other content than was written")
            try:
                if self._rollouts is not None:
                    self._rollouts.read(notes["position"]["iteration"])
            except UserError as error:
                raise DamagedCheckpoint(str(error)) from error
        changed = workers.call(Worker.resume, folder, self._keeps_reference)[0]
        if changed:
            print(f"resuming with another layout than {folder} was saved with: {changed}; sums round differently now")
        self.start = Position(**notes["position"])
        self.metrics_mark = notes
        self._batch, self._saved_at = notes["batch"], self.start.steps_taken

    def kept(self) -> Collected:
        batch, about = read_batch(self.folder / self._batch["file"])
        return Collected(batch, **about)

    # --- keeping ---------------------------------------------------------------------------------------------------

    def keep(self, collected: Collected) -> None:
        self._collected, self._batch = collected, None  # it is written with the first checkpoint that needs it

    def reached(self, position: Position, *, saves: bool = True) -> None:
        self.settle(wait=False)
        if position.step == 0:
            self._collected = None  # the last iteration's, which no checkpoint needs any more
        stop = self._run.stop.is_asked()
        steps = position.steps_taken - self._saved_at
        begins_iteration = position.step == 0 and steps > 0
        if saves and (begins_iteration or steps >= self._config.every_steps or (stop and steps > 0)):
            self._save(position)
        if stop:
            self.settle()
            raise RunStopped(f"stopped, with everything up to step {self._saved_at} of this stage saved")

    def alive(self) -> None:
        self._run.stop.alive()

    def stop_if_asked(self) -> None:
        if self._run.stop.was_asked:
            raise RunStopped(f"stopped, with everything up to step {self._saved_at} and all finished responses saved")

    def save(self, position: Position) -> None:
        if position.steps_taken > self._saved_at:  # otherwise the last checkpoint suffices
            self._save(position)
        self.settle()

    def keep_failure(self, position: Position, batch: TrainingBatch, about: dict[str, Any]) -> str:
        """The batch in a file, the weights in a folder of the same name."""
        self.settle()
        path = self._run.folder.failure(self._stage, position.steps_taken - 1)
        self._model.workers.call(Worker.save, path.with_suffix(""), None)
        write_batch(batch, {"metrics": about}, path)
        return str(path)

    def _save(self, position: Position) -> None:
        self.settle()  # one at a time
        require_finite(self._model, f"after step {position.steps_taken}", f"resumes from step {self._saved_at}")
        if position.step and self._collected is not None and self._batch is None:
            path = self.folder / f"batch_{position.iteration:05d}.safetensors"
            about = {"items": self._collected.items, "statistics": self._collected.statistics}
            write_batch(self._collected.batch, about, path)
            self._batch = {"file": path.name, "checksum": checksum(path)}
        batch = self._batch if position.step else None
        notes = {"position": asdict(position), **self._run.log.mark, "batch": batch}
        folder, reshardable = self.folder / f"step_{position.steps_taken:08d}", self._config.reshardable
        self._model.workers.call(Worker.begin_save, folder, self._keeps_reference, notes, reshardable)
        self._is_writing = True
        self._saved_at = position.steps_taken
        self.settle(wait=not self._config.asynchronous)

    def settle(self, *, wait: bool = True) -> None:
        """Completes a checkpoint that is being written, if all of it is on disk; wait: as soon as it is. Called before
        the training is left.

        Removes all but the newest checkpoints, the newest that can do without the batch that these share, and their
        batches."""
        if not self._is_writing:
            return
        self._is_writing = False  # also where it could not be written: then nothing is left to complete
        if not self._model.workers.call(Worker.is_saved, wait)[0]:
            self._is_writing = True
            return
        batches = {}
        for folder in self._checkpoints():
            try:
                batch = checkpoint.load_extra(folder)["batch"]
            except DamagedCheckpoint:
                continue
            batches[folder] = batch and batch["file"]
        newest = list(batches)[-self._config.keep :]
        shared = batches[newest[-1]]
        others = [folder for folder, file in batches.items() if shared is not None and file != shared]
        kept = {*newest, *others[-1:]}
        for folder in self.folder.glob("step_*"):
            if folder not in kept:
                shutil.rmtree(folder)
        needed = {batches[folder] for folder in kept}
        for path in self.folder.glob("batch_*"):
            if path.name not in needed:
                path.unlink()

    def _checkpoints(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if not path.suffix)


def require_finite(model: RemotePolicy, when: str, rerun: str = "resumes from the last checkpoint") -> None:
    """Raises StoppedByGuard where a weight is not finite: saved, it would end each resumed run.

    when, rerun: in words, the place in the training and what the same command does.
    """
    if not model.workers.call(Worker.is_finite)[0]:
        raise StoppedByGuard(
            f"not all weights are finite numbers {when}, so they are not saved: rerun the command, which {rerun}; "
            "if it ends here again, start another run with a lower optimizer.lr"
        )
