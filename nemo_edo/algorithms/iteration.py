"""Algorithm 1 of the paper: generate with the frozen policy, score, build, train, push weights, evaluate, repeat.

An iteration samples for the whole prompt set from pi_t and then takes many optimizer steps on these samples. The
exploration term needs them: its expected gradient is zero while the policy equals its sampler.

A training resumes between any two steps, and a collection between any two of its parts (``progress.Progress``). With
an engine that has separate weights, an iteration's samples may be generated while the one before trains
(``ahead.Ahead``).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from nemo_edo.algorithms.ahead import Ahead, NothingAhead
from nemo_edo.algorithms.collection import Collected, Objective, step_statistics
from nemo_edo.algorithms.guards import Guards, loggable, respond
from nemo_edo.algorithms.hazards import collection_hazards, exploration_hazards
from nemo_edo.algorithms.older import with_older_samples
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.progress import FromTheBeginning, Position, Progress
from nemo_edo.algorithms.samples import Samples, generate_samples, stored_samples
from nemo_edo.algorithms.supervised import Log
from nemo_edo.data.batching import minibatches
from nemo_edo.errors import StoppedByGuard, UserError
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer, WeightSync
from nemo_edo.losses import NotFinite, Schedule, build_schedule
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.phases import PhaseClock


@dataclass(frozen=True)
class Services:
    """What Algorithm 1 calls; ``Plan`` has its settings."""

    policy: Policy
    engine: GenerationEngine
    weight_sync: WeightSync
    scorer: Scorer
    objective: Objective
    store: RolloutStore
    log: Log
    progress: Progress = field(default_factory=FromTheBeginning)
    given: RolloutStore | None = None
    """Stored rollouts to train on; None: the policy generates its own."""
    ahead: Ahead = field(default_factory=NothingAhead)
    """What generates the next iteration's samples while one trains."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """What knows where the time of an iteration went."""


def run_iterations(run: Services, plan: Plan, evaluate: Callable[[int], bool]) -> None:
    """T iterations. ``evaluate(t)`` is called with pi_t before each of them, and with pi_T at the end; it returns
    whether the training ends there."""
    for hazard in exploration_hazards(plan.config, plan.steps_per_collection, plan.sampling.top_p):
        warnings.warn(hazard, stacklevel=2)
    start, last = run.progress.start, plan.config.iterations
    state = _State(start, plan)
    if start.step == 0:  # within an iteration, the weights have no version
        run.weight_sync.push(start.iteration)
    with closing(run.ahead):
        for t in range(start.iteration, last):
            if start.step and t == start.iteration:
                first, collected = start.step, run.progress.kept(t)
            else:
                first, here = 0, state.position(t)
                run.progress.reached(here)
                if evaluate(t):
                    return
                if t:
                    run.policy.move_reference(plan.config.reference, plan.config.ema_decay)
                samples = generate_and_score(run, plan, here)  # on disk before any of them is trained on
                if t + 1 < last:
                    run.ahead.begin(t + 1)
                run.weight_sync.release()
                collected = with_older_samples(build(run, samples, t), plan, run.store, t)
                _record_collection(run, plan, collected, samples, here, state)
            for step, batch in enumerate(_batches(run, plan, collected, t, first), start=first):
                metrics = train_step(run.policy, batch, state.schedule, plan.config.beta, state.guards.grad_norm_limit)
                _record_step(run, metrics, batch, state, t, step)
            run.ahead.finish()  # the next samples are those of the weights that the engine has now
            run.weight_sync.push(t + 1)
            run.log("phases", iteration=t, time=run.clock.take())
        evaluate(last)


class _State:
    """What changes from step to step and is in every checkpoint."""

    def __init__(self, start: Position, plan: Plan) -> None:
        self.schedule = build_schedule(plan.config.schedule, plan.config.exploration_weight)
        if start.schedule is not None:
            self.schedule.load_state_dict(start.schedule)
        self.guards = Guards(plan.guards, start.guards)
        self.steps_taken = start.steps_taken

    def position(self, t: int, step: int = 0) -> Position:
        """Iteration t, with ``step`` of its optimizer steps taken."""
        return Position(t, step, self.steps_taken, self.schedule.state_dict(), self.guards.state_dict())


# --- samples ------------------------------------------------------------------------------------------------------


def generate_and_score(run: Services, plan: Plan, here: Position) -> Samples:
    """The scored samples of ``here.iteration``, which the store has when this returns."""
    t = here.iteration
    if run.given is not None:
        samples = stored_samples(plan, t, run.given)
    else:
        samples = generate_samples(
            plan,
            t,
            engine=run.engine,
            scorer=run.scorer,
            store=run.store,
            before_part=lambda: run.progress.reached(here),
        )
    run.store.write(t, samples.everything, rank=0, world_size=1)
    if not samples.kept:
        groups = len(samples.everything) // plan.sampling.samples_per_prompt
        raise UserError(
            f"iteration {t}: the rewards within each of the {groups} groups are equal, so dynamic sampling leaves "
            "nothing to train on; take easier or harder problems, or set dynamic_sampling=false"
        )
    return samples


# --- what is trained on -------------------------------------------------------------------------------------------


def build(run: Services, samples: Samples, t: int) -> Collected:
    """The iteration's batch from its samples; the policy is still pi_t."""
    try:
        collected = run.objective.build(samples.kept, run.policy)
    except NotFinite as error:
        raise StoppedByGuard(
            f"iteration {t}: {error}: the policy's probabilities of its own samples are not numbers; lower "
            "optimizer.lr, or go back to an earlier policy"
        ) from error
    return replace(collected, statistics=collected.statistics | samples.statistics(t))


def _record_collection(
    run: Services, plan: Plan, collected: Collected, samples: Samples, here: Position, state: _State
) -> None:
    """Logs the collection, says where it teaches nothing, asks the guards about it, and keeps it for a resumed run."""
    place, statistics = {"iteration": here.iteration}, collected.statistics
    speed = samples.speed or run.ahead.speed
    run.log("collection", **place, policy_version=samples.version, **loggable(statistics), time=speed)
    for hazard in collection_hazards(statistics, plan.config, state.schedule.weight, first=here.iteration == 0):
        warnings.warn(f"iteration {here.iteration}: {hazard}", stacklevel=2)
    respond(state.guards.collection(statistics), here, place, log=run.log, progress=run.progress)
    run.progress.keep(here.iteration, collected)


def _batches(run: Services, plan: Plan, collected: Collected, t: int, first: int) -> Iterator[TrainingBatch]:
    """The iteration's optimizer steps, starting with the given one."""
    epochs, size = plan.config.epochs, plan.config.minibatch_size
    orders = (collected.order(plan.seed, t * epochs + n, keep_groups=plan.keeps_groups) for n in range(epochs))
    steps = (
        (items, f"{plan.seed} {t} {epoch} {place}")
        for epoch, order in enumerate(orders)
        for place, items in enumerate(minibatches(order, size))
    )
    for items, seed in islice(steps, first, None):
        yield run.objective.minibatch(collected, items, seed)


# --- training -----------------------------------------------------------------------------------------------------


def train_step(
    policy: Policy, batch: TrainingBatch, schedule: Schedule, beta: float, grad_norm_limit: float
) -> dict[str, Any]:
    """An optimizer step with the schedule's exploration weight, and what is logged about it. The schedule advances
    unless the step is skipped."""
    begun = time.monotonic()
    ratio = policy.exploration_gradient_ratio(batch) if schedule.needs_gradients else None
    weight = schedule.weight
    metrics = policy.train_step(batch, exploration_weight=weight, grad_norm_limit=grad_norm_limit)
    seconds = time.monotonic() - begun
    if not metrics["skipped"]:
        schedule.step(entropy=metrics["entropy"], gradient_ratio=ratio)
    measured = {"exploration_weight": weight}
    if ratio is not None and math.isfinite(ratio):  # inf without advantages, NaN in a broken batch: not for the log
        measured = {"exploration_gradient_ratio": ratio, **measured}
    if beta > 0:
        measured["effective_alpha"] = weight / beta
    speed = {"step_s": seconds, "tokens_per_s": int((batch.mask != 0).sum()) / seconds}
    return {**metrics, **step_statistics(batch), **measured, "time": speed}


def _record_step(
    run: Services, metrics: Mapping[str, Any], batch: TrainingBatch, state: _State, t: int, step: int
) -> None:
    """Logs the step, asks the guards about it, and saves where a checkpoint is due."""
    place = {"iteration": t, "step": state.steps_taken}
    alarms = state.guards.step(metrics)
    run.log("train_step", **place, **loggable(metrics), skipped_steps=state.guards.skipped_steps)
    state.steps_taken += 1
    here = state.position(t, step + 1)
    respond(alarms, here, place, log=run.log, progress=run.progress, batch=batch, about=metrics)
    run.progress.reached(here)
