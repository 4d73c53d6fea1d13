"""Services that Algorithm 1 calls, and its progress for a restart."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_edo.algorithms.collection import Collected, Objective
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer, WeightSync
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.phases import PhaseClock

Log = Callable[..., None]
"""log(kind, **values) keeps a line of metrics."""


@dataclass(frozen=True)
class Position:
    """A place between two optimizer steps. Plain values, which survive JSON."""

    iteration: int = 0
    step: int = 0
    """Optimizer steps taken in the iteration; 0: its samples are not collected yet, and the weights are pi_t."""
    steps_taken: int = 0
    """Since the beginning of the training."""
    schedule: dict[str, Any] | None = None
    """The state of the exploration weight's schedule; None: there is none, or it has not begun."""
    guards: dict[str, Any] | None = None
    """The state of the guards; None: they have seen nothing yet."""


class Progress:
    """Says where a training resumes, and saves it. This one begins at the beginning and saves nothing."""

    start = Position()

    def reached(self, position: Position, *, saves: bool = True) -> None:
        """Called wherever the training may stop: saves if a checkpoint is due, and raises RunStopped, with everything
        saved, if the run is asked to stop. saves: False where the training cannot resume from here; once stopped, it
        resumes from the last checkpoint."""

    def alive(self) -> None:
        """A sign of life while responses are generated, from any thread."""

    def stop_if_asked(self) -> None:
        """Raises RunStopped if the run is asked to stop while responses are generated, from any thread."""

    def save(self, position: Position) -> None:
        """Saves now, whether a checkpoint is due or not."""

    def keep_failure(self, position: Position, batch: TrainingBatch, about: dict[str, Any]) -> str:
        """Keeps a batch that the training broke on, with the weights that it broke, and returns where."""
        return "nowhere"

    def keep(self, collected: Collected) -> None:
        """Keeps the data that an iteration trains on. They cannot be rebuilt after the first step: log-probabilities
        under pi_t need pi_t."""

    def kept(self) -> Collected:
        """The data of ``keep``, to the last bit. Called when ``start`` is within an iteration."""
        raise LookupError("nothing is kept")


@dataclass(frozen=True)
class Services:
    """The parts of a training."""

    policy: Policy
    engine: GenerationEngine
    weight_sync: WeightSync
    scorer: Scorer
    objective: Objective
    store: RolloutStore
    log: Log
    progress: Progress = field(default_factory=Progress)
    given: RolloutStore | None = None
    """Stored rollouts to train on; None: the policy generates its own."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """The clock of an iteration's phases."""
