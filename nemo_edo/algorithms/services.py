"""The services that Algorithm 1 calls; ``plan.Plan`` has its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_edo.algorithms.collection import Objective
from nemo_edo.algorithms.progress import Ahead, Progress
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer, WeightSync
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.utils.phases import PhaseClock

Log = Callable[..., None]
"""log(kind, **values) keeps a line of metrics."""


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
    ahead: Ahead = field(default_factory=Ahead)
    """The generator of the next iteration's samples while one trains."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """The clock of an iteration's phases."""
