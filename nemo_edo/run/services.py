"""What a run's stages work with, and what Algorithm 1 calls in an arm of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_edo.algorithms.ahead import InBackground, SavesBetween
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.progress import Progress
from nemo_edo.algorithms.services import Services
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run.build import Builder
from nemo_edo.run.console import RunConsole
from nemo_edo.run.folder import RunFolder
from nemo_edo.run.inputs import Data
from nemo_edo.run.metrics_log import MetricsLog
from nemo_edo.run.settings import RunSettings
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.utils.phases import PhaseClock

if TYPE_CHECKING:
    from nemo_edo.worker.remote import RemotePolicy


@dataclass(frozen=True)
class RunServices:
    """What every stage of a run works with."""

    folder: RunFolder
    data: Data
    builder: Builder
    log: MetricsLog
    stop: StopSignal
    console: RunConsole
    clock: PhaseClock
    tracker: object = None

    def store(self, folder: Any) -> RolloutStore:
        """Rollouts in a folder, with the run's tokenizer."""
        return RolloutStore(folder, tokenizer=tokenizer_identity(self.data.tokenizer))

    def close(self) -> None:
        self.console.close()
        self.builder.close()
        self.folder.close()


class StageLog:
    """A stage's lines of metrics.jsonl."""

    def __init__(self, run: RunServices, stage: str) -> None:
        self._log, self._clock, self._stage = run.log, run.clock, stage

    def __call__(self, kind: str, **values: Any) -> None:
        with self._clock.phase("data"):
            self._log(kind, arm=self._stage, **values)


def training_services(run: RunServices, model: RemotePolicy, arm: str, plan: Plan, progress: Progress) -> Services:
    """The services that Algorithm 1 calls in an arm."""
    services = Services(
        policy=model,
        engine=model.engine,
        weight_sync=model.weight_sync,
        scorer=run.data.scorer,
        objective=run.builder.objective(plan.config, plan.seed),
        store=run.store(run.folder.rollouts(arm)),
        log=StageLog(run, arm),
        progress=progress,
        given=run.builder.given_rollouts(arm),
        clock=run.clock,
    )
    if not plan.lag:
        return services
    # The thread's store is its own.
    ahead = InBackground(replace(services, store=run.store(run.folder.rollouts(arm))), plan)
    return replace(services, ahead=ahead, progress=SavesBetween(progress, ahead))


@contextmanager
def profiled(run: RunServices, settings: RunSettings, arm: str, services: Services) -> Iterator[Services]:
    """Rank 0's steps of ``profile.steps`` are traced."""
    steps = settings.profile.steps
    if steps is None:
        yield services
        return
    from nemo_edo.run.profiler import StepProfiler

    path = run.folder.path / "profile" / f"{arm}.json.gz"
    profiler = StepProfiler(services.log, tuple(steps), path, arm, services.progress.start.steps_taken)
    try:
        yield replace(services, log=profiler)
    finally:
        profiler.close()
