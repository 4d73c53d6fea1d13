"""What a run's stages work with, what Algorithm 1 calls in an arm of it, and a trace of some of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.samples import InBackground
from nemo_edo.algorithms.services import Log, Progress, Services
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run.build import Builder, RunSettings
from nemo_edo.run.inputs import Data
from nemo_edo.run.metrics_log import MetricsLog, RunConsole
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run_folder import RunFolder
from nemo_edo.utils.phases import PhaseClock
from nemo_edo.worker.remote import RemotePolicy


@dataclass(frozen=True)
class RunServices:
    """What every stage of a run works with."""

    folder: RunFolder
    settings: RunSettings
    data: Data
    builder: Builder
    log: MetricsLog
    stop: StopSignal
    console: RunConsole
    clock: PhaseClock
    tracker: object = None

    def store(self, folder: Path) -> RolloutStore:
        """Rollouts in a folder, with the run's tokenizer."""
        return RolloutStore(folder, tokenizer=tokenizer_identity(self.data.tokenizer))

    def log_of(self, stage: str) -> Log:
        """A stage's lines of metrics.jsonl."""

        def log(kind: str, **values: Any) -> None:
            with self.clock.phase("data"):
                self.log(kind, arm=stage, **values)

        return log

    def close(self) -> None:
        self.console.close()
        self.builder.close()
        self.folder.close()


def training_services(run: RunServices, model: RemotePolicy, arm: str, plan: Plan, progress: Progress) -> Services:
    """The services that Algorithm 1 calls in an arm."""
    services = Services(
        policy=model,
        engine=model.engine,
        weight_sync=model.weight_sync,
        scorer=run.data.scorer,
        objective=run.builder.objective(plan.config, plan.seed),
        store=run.store(run.folder.rollouts(arm)),
        log=run.log_of(arm),
        progress=progress,
        given=run.builder.given_rollouts(arm),
        clock=run.clock,
    )
    if not plan.lag:
        return services
    # The thread's store is its own.
    return replace(services, ahead=InBackground(replace(services, store=run.store(services.store.folder)), plan))


@contextmanager
def profiled(run: RunServices, arm: str, services: Services) -> Iterator[Services]:
    """Rank 0's steps of ``profile.steps`` are traced."""
    steps = run.settings.profile.steps
    if steps is None:
        yield services
        return
    path = run.folder.path / "profile" / f"{arm}.json.gz"
    profiler = StepProfiler(services.log, tuple(steps), path, arm, services.progress.start.steps_taken)
    try:
        yield replace(services, log=profiler)
    finally:
        profiler.close()


class StepProfiler:
    """A log that profiles from one optimizer step to another while it hands on what it gets.

    The trace, in Chrome's format (chrome://tracing, Perfetto, TensorBoard), has the steps ``first`` to ``last`` - 1 and
    what is between them, generation for example. On a GPU the same span is an NVTX range, ``STAGE steps FIRST-LAST``,
    between cudaProfilerStart and cudaProfilerStop, which ``nsys profile --capture-range=cudaProfilerApi`` looks for.
    """

    def __init__(self, log: Log, steps: tuple[int, int], path: Path, name: str, next_step: int = 0) -> None:
        """path: of the trace. name: of the range. next_step: the step that is taken next, in a resumed run not 0."""
        self._log = log
        self._first, self._last = steps
        self._path = path
        self._name = f"{name} steps {self._first}-{self._last}"
        self._profile: profile | None = None
        if next_step == self._first:
            self._begin()

    def __call__(self, kind: str, **values: Any) -> None:
        self._log(kind, **values)
        if kind == "train_step":
            if values["step"] + 1 == self._last:
                self.close()
            elif values["step"] + 1 == self._first:
                self._begin()

    def close(self) -> None:
        """Ends the trace, if one is in progress, and writes it."""
        if self._profile is None:
            return
        self._profile.stop()
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        print(f"profile of {self._name}: {self._path}", flush=True)
        self._profile = None

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.profiler.start()
            torch.cuda.nvtx.range_push(self._name)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()
