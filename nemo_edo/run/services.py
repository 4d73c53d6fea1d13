"""What a run's stages work with, what Algorithm 1 calls in an arm of it, and a trace of some of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.services import Log, Progress, Services
from nemo_edo.config import ArmConfig, RunConfig
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run.build import Builder
from nemo_edo.run.inputs import Data
from nemo_edo.run.metrics_log import MetricsLog, RunConsole
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.tracking import end_tracking
from nemo_edo.run_folder import RunFolder
from nemo_edo.utils.phases import PhaseClock
from nemo_edo.worker.remote import RemotePolicy

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True)
class RunServices:
    """What every stage of a run works with."""

    folder: RunFolder
    cfg: RunConfig
    arms: dict[str, ArmConfig]
    data: Data
    builder: Builder
    log: MetricsLog
    stop: StopSignal
    console: RunConsole
    clock: PhaseClock
    tracker: pl.Trainer | None = None

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
        self.log.close()
        if self.tracker is not None:
            end_tracking(self.tracker, finished=self.folder.is_finished)
        self.folder.close()


def training_services(run: RunServices, model: RemotePolicy, arm: str, plan: Plan, progress: Progress) -> Services:
    """The services that Algorithm 1 calls in an arm."""
    return Services(
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


@contextmanager
def profiled(run: RunServices, arm: str, services: Services) -> Iterator[Services]:
    """Services whose log traces rank 0 from one optimizer step to another (``profile.steps``).

    The trace, in Chrome's format (chrome://tracing, Perfetto, TensorBoard), has the steps ``first`` to ``last`` - 1 and
    what is between them, generation for example; of a run that resumes within them, nothing.
    """
    steps = run.cfg.profile.steps
    if steps is None:
        yield services
        return
    (first, last), path = steps, run.folder.path / "profile" / f"{arm}.json.gz"
    with ExitStack() as trace:

        def reached(step: int) -> None:
            if step == last:
                trace.close()
            elif step == first:
                trace.enter_context(_trace(f"{arm} steps {first}-{last}", path))

        def log(kind: str, **values: Any) -> None:
            services.log(kind, **values)
            if kind == "train_step":
                reached(values["step"] + 1)

        reached(services.progress.start.steps_taken)
        yield replace(services, log=log)


@contextmanager
def _trace(name: str, path: Path) -> Iterator[None]:
    """A trace of the block, written to the path. On a GPU the same span is an NVTX range of that name between
    cudaProfilerStart and cudaProfilerStop, which ``nsys profile --capture-range=cudaProfilerApi`` looks for."""
    activities = [ProfilerActivity.CPU]
    with ExitStack() as spans:
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            spans.enter_context(torch.cuda.profiler.profile())
            spans.enter_context(torch.cuda.nvtx.range(name))
        traced = spans.enter_context(profile(activities=activities, record_shapes=True))
        try:
            yield
        finally:
            spans.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(path))
            print(f"profile of {name}: {path}", flush=True)
