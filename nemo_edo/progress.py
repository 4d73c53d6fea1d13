"""Checkpoints that a killed run goes on from, and the signal that asks a run to stop."""

from __future__ import annotations

import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_edo.algorithms.ahead import Ahead
from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.progress import Position
from nemo_edo.cluster.control import stop_is_asked
from nemo_edo.cluster.stall import StallWatch
from nemo_edo.config import CheckpointConfig
from nemo_edo.data.batch_file import read_batch, write_batch
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.megatron import checkpoint
from nemo_edo.megatron.background import Writing
from nemo_edo.megatron.checksums import DamagedCheckpoint, checksum
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.parallel.main_rank import any_rank, is_main, on_main, on_main_for_long
from nemo_edo.types import ScoredRollout, TrainingBatch


class StopSignal:
    """Inside the block, SIGTERM (of a scheduler whose allocation ends) does not end the process: it is remembered. A
    job of ``nemo-edo launch`` asks by a file, too. Asking whether to stop is a sign of life for ``watch``."""

    def __init__(self, watch: StallWatch | None = None) -> None:
        self._received = False
        self._watch = watch

    def __enter__(self) -> StopSignal:
        self._earlier = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._earlier)
        if self._watch is not None:
            self._watch.close()

    def _receive(self, *_) -> None:
        self._received = True

    def agreed(self) -> bool:
        """Whether any rank has received it. Every rank calls this at the same place."""
        if self._watch is not None:
            self._watch.beat()
        return any_rank(self._received or (is_main() and stop_is_asked()))


class SavedProgress:
    """An ``algorithms.progress.Progress`` in a folder: ``step_00000120`` and so on, each a checkpoint with the
    optimizer's state, and ``batch_00003.safetensors``, what iteration 3 trains on.

    A checkpoint's name counts the optimizer steps before it. Its notes hold the position, the length of metrics.jsonl
    at that time, and the checksum of the batch, if it lies within an iteration.
    """

    def __init__(
        self,
        model: MegatronGPTModel,
        folder: Path,
        config: CheckpointConfig,
        *,
        stop: StopSignal,
        metrics_size: Callable[[], int],
        failure: Callable[[int], Path],
        keeps_reference: bool = False,
    ) -> None:
        """failure: where the batch of a step, by its number, is kept that the training broke on.
        keeps_reference: whether the model's reference moves in a way that it cannot be had again (ema)."""
        self.folder = folder
        self.start = Position()
        self.metrics_bytes: int | None = None
        """The length of metrics.jsonl at ``start``; None where there was no checkpoint to go on from."""
        self._model = model
        self._config = config
        self._stop = stop
        self._metrics_size = metrics_size
        self._failure = failure
        self._keeps_reference = keeps_reference
        self._collected: Collected | None = None
        self._writing: Writing | None = None
        """The checkpoint that is being written."""
        self._batch: dict[str, Any] | None = None
        """File name and checksum of the current iteration's batch on disk."""
        self._saved_at = 0

    # --- going on --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Loads the newest checkpoint that is whole into the model and sets ``start``. Damaged ones are warned of, and
        removed: the training will come to that place again."""
        for folder in on_main(self._checkpoints)[::-1]:
            try:
                self._load(folder)
            except DamagedCheckpoint as error:
                if is_main():
                    warnings.warn(f"{error}; going on from before it", stacklevel=2)
                    shutil.rmtree(folder)
            else:
                return

    def _load(self, folder: Path) -> None:
        checkpoint.load(self._model.policy, folder, with_optimizer=True)
        changed = checkpoint.changed_layout(folder)
        if changed and is_main():
            print(f"going on at another layout than {folder} was saved at: {changed}; sums are rounded otherwise now")
        notes = checkpoint.load_extra(folder)
        if notes["batch"] is not None:
            on_main(lambda: _require_unchanged(self.folder / notes["batch"]["file"], notes["batch"]["checksum"]))
        if self._keeps_reference:
            self._model.reference = checkpoint.load_reference(self._model.policy, folder)
        self.start = Position(**notes["position"])
        self.metrics_bytes = notes["metrics_bytes"]
        self._batch, self._saved_at = notes["batch"], self.start.steps_taken

    def kept(self, iteration: int) -> Collected:
        """``algorithms.progress.Progress``."""
        return read_collected(self.folder / self._batch["file"])

    # --- keeping ---------------------------------------------------------------------------------------------------

    def keep(self, iteration: int, collected: Collected) -> None:
        """``algorithms.progress.Progress``. It is written with the first checkpoint that needs it."""
        self._collected, self._batch = collected, None

    def reached(self, position: Position, *, saves: bool = True) -> None:
        """``algorithms.progress.Progress``."""
        self.settle(wait=False)
        stop = self._stop.agreed()
        steps = position.steps_taken - self._saved_at
        begins_iteration = position.step == 0 and steps > 0
        if saves and (begins_iteration or steps >= self._config.every_steps or (stop and steps > 0)):
            self._save(position)
        if stop:
            self.settle()
            raise RunStopped(f"asked to stop: everything up to step {self._saved_at} of this stage is saved")

    def save(self, position: Position) -> None:
        """``algorithms.progress.Progress``. Where no step was taken since the last checkpoint, that one will do."""
        if position.steps_taken > self._saved_at:
            self._save(position)
        self.settle()

    def keep_failure(self, position: Position, batch: TrainingBatch, about: dict[str, Any]) -> str:
        """``algorithms.progress.Progress``. The batch in a file, and beside it the weights in a folder of its name."""
        self.settle()
        path = self._failure(position.steps_taken - 1)
        checkpoint.save(self._model.policy, path.with_suffix(""))
        on_main(lambda: write_batch(batch, {"metrics": about}, path))
        return str(path)

    def _save(self, position: Position) -> None:
        self.settle()  # one at a time
        if position.step and self._collected is not None and self._batch is None:
            self._batch = on_main(lambda: self._write_batch(position.iteration))
        notes = {
            "position": asdict(position),
            "metrics_bytes": self._metrics_size(),
            "batch": self._batch if position.step else None,
        }
        self._writing = checkpoint.begin_save(
            self._model.policy,
            self.folder / f"step_{position.steps_taken:08d}",
            with_optimizer=True,
            reference=self._model.reference if self._keeps_reference else None,
            extra=notes,
            reshardable=self._config.reshardable,
        )
        self._saved_at = position.steps_taken
        self.settle(wait=not self._config.asynchronous)

    def settle(self, *, wait: bool = True) -> None:
        """Makes a checkpoint that is being written one to go on from, if all of it is there; wait: once it is. Every
        rank calls it at the same place, and before it leaves the training."""
        if self._writing is not None and self._writing.is_finished(wait=wait):
            self._writing = None
            on_main(self._prune)

    def _write_batch(self, iteration: int) -> dict[str, Any]:
        path = self.folder / f"batch_{iteration:05d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_collected(self._collected, path)
        return {"file": path.name, "checksum": checksum(path)}

    def _checkpoints(self) -> list[Path]:
        """In the order of their steps."""
        return sorted(path for path in self.folder.glob("step_*") if path.suffix != ".part")

    def _prune(self) -> None:
        """Leaves the newest checkpoints and what they need. Nothing is being written now."""
        for folder in self.folder.glob("*.part"):
            shutil.rmtree(folder)
        folders = self._checkpoints()
        for folder in folders[: -self._config.keep]:
            shutil.rmtree(folder)
        batches = [checkpoint.load_extra(folder)["batch"] for folder in folders[-self._config.keep :]]
        needed = {batch["file"] for batch in batches if batch is not None}
        for path in self.folder.glob("batch_*"):
            if path.name not in needed:
                path.unlink()


def _require_unchanged(path: Path, expected: str) -> None:
    if not path.is_file() or checksum(path) != expected:
        state = "has other content than was written" if path.is_file() else "is missing"
        raise DamagedCheckpoint(f"{path} {state}")


# --- an iteration's batch on disk ---------------------------------------------------------------------------------


def write_collected(collected: Collected, path: Path) -> None:
    """All of it in one file, from which ``read_collected`` has it back to the last bit."""
    write_batch(collected.batch, {"items": collected.items, "statistics": collected.statistics}, path)


def read_collected(path: Path) -> Collected:
    """Raises UserError for a file that is no iteration's batch."""
    batch, about = read_batch(path)
    if about.keys() != {"items", "statistics"}:
        raise UserError(f"{path} is not the batch of an iteration: it has no items and statistics")
    return Collected(batch, **about)


class AheadOnMain:
    """An ``algorithms.ahead.Ahead`` of rank 0, whose state all ranks learn where they ask for it."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead

    @property
    def speed(self) -> dict[str, float]:
        return self._ahead.speed

    def begin(self, iteration: int) -> None:
        if is_main():
            self._ahead.begin(iteration)

    def is_done(self) -> bool:
        return on_main(self._ahead.is_done)

    def finish(self) -> None:
        on_main_for_long(self._ahead.finish)

    def stop(self) -> None:
        """Without a word to the others: one of them may have ended by an error of its own."""
        self._ahead.stop()


class SharedRolloutStore(RolloutStore):
    """A RolloutStore that rank 0 reads for all ranks: what it finds cannot change while another one looks."""

    def drawn(self, iteration: int) -> list[ScoredRollout]:
        return on_main(lambda: super(SharedRolloutStore, self).drawn(iteration))

    def unfinished(self, iteration: int) -> list[ScoredRollout]:
        return on_main(lambda: super(SharedRolloutStore, self).unfinished(iteration))
