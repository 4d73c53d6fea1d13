"""What Algorithm 1 calls in an arm of a run, each call in its phase of the run's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from nemo_edo.algorithms.ahead import Ahead, InBackground, NothingAhead, SavesBetween, generate_ahead
from nemo_edo.algorithms.iteration import Services
from nemo_edo.algorithms.plan import Plan
from nemo_edo.rollouts.store import RolloutStore, tokenizer_identity
from nemo_edo.run import build, inputs
from nemo_edo.utils.phases import timed

if TYPE_CHECKING:
    from nemo_edo.run.resume import SavedProgress
    from nemo_edo.run.stages import Job
    from nemo_edo.worker.remote import RemotePolicy

CHECKPOINTS = dict.fromkeys(("reached", "save", "keep_failure", "keep", "kept"), "checkpoint")
_STORED = ("stored", "unfinished", "write", "write_part", "write_unfinished")


def services(job: Job, model: RemotePolicy, arm: str, plan: Plan, progress: SavedProgress) -> Services:
    """What Algorithm 1 calls, each in its phase of the clock."""
    data, clock, tokenizer = job.data, job.clock, tokenizer_identity(job.data.tokenizer)
    ahead = _generating_ahead(job, model, arm, plan) if job.cfg.generation.one_step_off else NothingAhead()
    ahead = timed(ahead, clock, finish="wait", close="wait")
    store = RolloutStore(job.folder.rollouts(arm), tokenizer=tokenizer)
    objective = build.build_objective(job.cfg, plan.config, data, plan.seed)
    given = inputs.given_rollouts(job.cfg, arm, data)
    return Services(
        policy=timed(
            model,
            clock,
            logprobs="log_pi_old",
            reference_logprobs="log_pi_ref",
            move_reference="log_pi_ref",
            train_step="train",
            exploration_gradient_ratio="train",
        ),
        engine=timed(model.engine, clock, generate="generate"),
        weight_sync=timed(model.weight_sync, clock, push="refit", release="refit"),
        scorer=timed(data.scorer, clock, score="score"),
        objective=timed(objective, clock, build="data", minibatch="data"),
        store=timed(store, clock, **dict.fromkeys(_STORED, "data")),
        log=stage_log(job, arm),
        progress=timed(SavesBetween(progress, ahead), clock, **CHECKPOINTS),
        given=None if given is None else timed(given, clock, stored="data"),
        ahead=ahead,
        clock=clock,
    )


def stage_log(job: Job, stage: str) -> Callable[..., None]:
    """The stage's lines of metrics.jsonl."""
    return job.clock.phase("data")(partial(job.log, arm=stage))


@contextmanager
def profiled(job: Job, arm: str, made: Services) -> Iterator[Services]:
    """Rank 0's steps of ``profile.steps`` are traced."""
    steps = job.cfg.profile.steps
    if steps is None:
        yield made
        return
    from nemo_edo.run.profiler import StepProfiler

    path = job.folder.path / "profile" / f"{arm}.json.gz"
    profiler = StepProfiler(made.log, tuple(steps), path, arm, made.progress.start.steps_taken)
    try:
        yield replace(made, log=profiler)
    finally:
        profiler.close()


def _generating_ahead(job: Job, model: RemotePolicy, arm: str, plan: Plan) -> Ahead:
    """Generates in a thread, which calls no worker."""
    from nemo_edo.generation.server_engine import StoppableEngine

    store = RolloutStore(job.folder.rollouts(arm), tokenizer=tokenizer_identity(job.data.tokenizer))

    def generate(t: int, stop: Event) -> dict[str, float]:
        engine = StoppableEngine(model.engine, stop)
        return generate_ahead(plan, t, stop, engine=engine, scorer=job.data.scorer, store=store)

    return InBackground(generate)
