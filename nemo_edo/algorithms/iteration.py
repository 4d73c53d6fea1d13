"""Algorithm 1 of the paper: generate with the frozen policy, score, build, train, push weights, evaluate, repeat.

An iteration samples for the whole prompt set from pi_t and then takes many optimizer steps on these samples. The
exploration term needs them: its expected gradient is zero while the policy equals its sampler.

A training resumes between any two steps, and a collection between any two of its parts (``services.Progress``). With
an engine that has separate weights, an iteration's samples may be generated while the one before trains
(``services.Ahead``).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from nemo_edo.algorithms.collection import Collected, step_statistics
from nemo_edo.algorithms.guards import Guards, loggable, respond
from nemo_edo.algorithms.plan import Plan, collection_hazards, exploration_hazards
from nemo_edo.algorithms.samples import IterationSamples, generate_and_score, with_older_samples
from nemo_edo.algorithms.services import Position, Services
from nemo_edo.config import GRPOConfig
from nemo_edo.data.batching import minibatches
from nemo_edo.errors import StoppedByGuard
from nemo_edo.losses import NotFinite, build_schedule
from nemo_edo.types import TrainingBatch


def run_iterations(run: Services, plan: Plan, evaluate: Callable[[int], bool]) -> None:
    """T iterations. ``evaluate(t)`` is called with pi_t before each of them, and with pi_T at the end; it returns
    whether the training ends there."""
    for hazard in exploration_hazards(plan.config, plan.steps_per_collection, plan.sampling.top_p):
        warnings.warn(hazard, stacklevel=2)
    start, last, clock = run.progress.start, plan.config.iterations, run.clock
    state = _State(start, plan)
    if start.step == 0:  # within an iteration, the weights have no version
        with clock.phase("refit"):
            run.weight_sync.push(start.iteration)
    with closing(run.ahead):
        for t in range(start.iteration, last):
            if start.step and t == start.iteration:
                first = start.step
                with clock.phase("checkpoint"):
                    collected = run.progress.kept(t)
            else:
                first, here = 0, state.position(t)
                with clock.phase("checkpoint"):
                    run.progress.reached(here)
                if evaluate(t):
                    return
                if t:
                    with clock.phase("log_pi_ref"):
                        run.policy.move_reference(plan.config.reference, plan.config.ema_decay)
                with clock.phase("data"):
                    samples = generate_and_score(run, plan, here)  # on disk before any of them is trained on
                if t + 1 < last:
                    run.ahead.begin(t + 1)
                with clock.phase("refit"):
                    run.weight_sync.release()
                with clock.phase("data"):
                    collected = with_older_samples(build(run, samples, t), plan, run.store, t)
                place, statistics = {"iteration": t}, collected.statistics
                speed = samples.speed or run.ahead.speed
                run.log("collection", **place, policy_version=samples.version, **loggable(statistics), time=speed)
                for hazard in collection_hazards(statistics, plan.config, state.schedule.weight, first=t == 0):
                    warnings.warn(f"iteration {t}: {hazard}", stacklevel=2)
                with clock.phase("checkpoint"):
                    respond(state.guards.collection(statistics), here, place, log=run.log, progress=run.progress)
                    run.progress.keep(t, collected)
            for step, batch in enumerate(_batches(run, plan, collected, t, first), start=first):
                metrics = _train_step(run, plan, batch, state)
                _record_step(run, metrics, batch, state, state.position(t, step))
            run.ahead.finish()  # the next samples are those of the weights that the engine has now
            with clock.phase("refit"):
                run.weight_sync.push(t + 1)
            run.log("phases", iteration=t, time=clock.take())
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


# --- what is trained on -------------------------------------------------------------------------------------------


def build(run: Services, samples: IterationSamples, t: int) -> Collected:
    """The iteration's batch from its samples; the policy is still pi_t."""
    try:
        collected = run.objective.build(samples.kept, run.policy, run.clock)
    except NotFinite as error:
        raise StoppedByGuard(
            f"iteration {t}: {error}: the policy's probabilities of its own samples are not numbers; lower "
            "optimizer.lr, or go back to an earlier policy"
        ) from error
    return replace(collected, statistics=collected.statistics | samples.statistics(t))


def _batches(run: Services, plan: Plan, collected: Collected, t: int, first: int) -> Iterator[TrainingBatch]:
    """The iteration's optimizer steps, starting with the given one."""
    epochs, size = plan.config.epochs, plan.config.minibatch_size
    keep_groups = isinstance(plan.config, GRPOConfig) and plan.config.keep_groups
    orders = (collected.order(plan.seed, t * epochs + n, keep_groups=keep_groups) for n in range(epochs))
    steps = (
        (items, f"{plan.seed} {t} {epoch} {place}")
        for epoch, order in enumerate(orders)
        for place, items in enumerate(minibatches(order, size))
    )
    for items, seed in islice(steps, first, None):
        with run.clock.phase("data"):
            batch = run.objective.minibatch(collected, items, seed)
        yield batch


# --- training -----------------------------------------------------------------------------------------------------


def _train_step(run: Services, plan: Plan, batch: TrainingBatch, state: _State) -> dict[str, Any]:
    """An optimizer step with the schedule's exploration weight, and what is logged about it. The schedule advances
    unless the step is skipped."""
    begun, schedule, policy = time.monotonic(), state.schedule, run.policy
    exploration_weight = schedule.weight
    with run.clock.phase("train"):
        ratio = policy.exploration_gradient_ratio(batch) if schedule.needs_gradients else None
        metrics = policy.train_step(
            batch, exploration_weight=exploration_weight, grad_norm_limit=state.guards.grad_norm_limit
        )
    seconds = time.monotonic() - begun
    if not metrics["skipped"]:
        schedule.step(entropy=metrics["entropy"], gradient_ratio=ratio)
    measured = {"exploration_weight": exploration_weight}
    if ratio is not None and math.isfinite(ratio):  # inf without advantages, NaN in a broken batch: not for the log
        measured = {"exploration_gradient_ratio": ratio, **measured}
    if plan.config.beta > 0:
        measured["effective_alpha"] = exploration_weight / plan.config.beta
    speed = {"step_s": seconds, "tokens_per_s": int((batch.mask != 0).sum()) / seconds}
    return {**metrics, **step_statistics(batch), **measured, "time": speed}


def _record_step(
    run: Services, metrics: Mapping[str, Any], batch: TrainingBatch, state: _State, before: Position
) -> None:
    """Logs the step that was taken at ``before``, asks the guards about it, and saves where a checkpoint is due.

    Nothing is saved while the next samples are generated: they need the weights that the iteration began with, and a
    checkpoint from its middle has others."""
    place = {"iteration": before.iteration, "step": before.steps_taken}
    alarms = state.guards.step(metrics)
    run.log("train_step", **place, **loggable(metrics), skipped_steps=state.guards.skipped_steps)
    state.steps_taken += 1
    here = state.position(before.iteration, before.step + 1)
    with run.clock.phase("checkpoint"):
        if run.ahead.is_done() or any(alarm.action == "stop" for alarm in alarms):
            run.ahead.finish()  # an error that ended it is raised now, not at the iteration's end
        respond(alarms, here, place, log=run.log, progress=run.progress, batch=batch, about=metrics)
        run.progress.reached(here, saves=run.ahead.is_done())
