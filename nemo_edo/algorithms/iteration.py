"""Algorithm 1 of the paper: generate with the frozen policy, score, build, train, push weights, evaluate, repeat.

An iteration samples for the whole prompt set from pi_t and then takes many optimizer steps on these samples. The
exploration term needs them: its expected gradient is zero while the policy equals its sampler.

A training resumes between any two steps, and a collection between any two of its parts (``services.Progress``). With
an engine that has separate weights, an iteration's samples may be generated while the one before trains
(``samples.Ahead``). Before all of it the policy learns the solutions of a problems file (``train_supervised``).
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count, islice

from nemo_edo.algorithms.collection import Collected, step_statistics
from nemo_edo.algorithms.guards import Guards, loggable, respond
from nemo_edo.algorithms.plan import Plan, collection_hazards, exploration_hazards
from nemo_edo.algorithms.samples import Ahead, IterationSamples, generate_and_score, with_older_samples
from nemo_edo.algorithms.services import Log, Position, Progress, Services
from nemo_edo.config import GRPOConfig, GuardsConfig, SFTConfig
from nemo_edo.data.batching import PromptAndResponse, build_batch, epoch_order, minibatches
from nemo_edo.errors import StoppedByGuard
from nemo_edo.interfaces import Policy
from nemo_edo.losses import NotFinite, build_schedule
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.phases import PhaseClock


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
    with closing(Ahead(run, plan)) as ahead:
        for t in range(start.iteration, last):
            if start.step and t == start.iteration:
                first = start.step
                with clock.phase("checkpoint"):
                    collected = run.progress.kept()
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
                    ahead.begin(t + 1)
                with clock.phase("refit"):
                    run.weight_sync.release()
                with clock.phase("data"):
                    collected = with_older_samples(build(run, samples, t), plan, run.store, t)
                place, statistics = {"iteration": t}, collected.statistics
                speed = samples.speed or ahead.speed
                run.log("collection", **place, policy_version=samples.version, **loggable(statistics), time=speed)
                del samples  # much memory: names keep their values until the next iteration has new ones
                for hazard in collection_hazards(statistics, plan.config, state.schedule.weight, first=t == 0):
                    warnings.warn(f"iteration {t}: {hazard}", stacklevel=2)
                with clock.phase("checkpoint"):
                    respond(state.guards.collection(statistics), here, place, log=run.log, progress=run.progress)
                    run.progress.keep(collected)
            for step, batch in enumerate(_batches(run, plan, collected, t, first), start=first):
                _step(run, plan, batch, state, ahead, t, step)
            del collected
            ahead.finish()  # the next samples are those of the weights that the engine has now
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
        return Position(t, step, self.steps_taken, self.schedule.state_dict(), self.guards.state_dict())


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


def _step(run: Services, plan: Plan, batch: TrainingBatch, state: _State, ahead: Ahead, t: int, step: int) -> None:
    """An optimizer step with the schedule's exploration weight: logs it, asks the guards about it, and saves where a
    checkpoint is due. The schedule advances unless the step is skipped.

    Nothing is saved while the next samples are generated: they need the weights that the iteration began with, and a
    checkpoint from its middle has others."""
    begun, schedule, weight = time.monotonic(), state.schedule, state.schedule.weight
    with run.clock.phase("train"):
        ratio = run.policy.exploration_gradient_ratio(batch) if schedule.needs_gradients else None
        metrics = run.policy.train_step(batch, exploration_weight=weight, grad_norm_limit=state.guards.grad_norm_limit)
    seconds = time.monotonic() - begun
    if not metrics["skipped"]:
        schedule.step(entropy=metrics["entropy"], gradient_ratio=ratio)
    metrics = {**metrics, **step_statistics(batch)}
    if ratio is not None and math.isfinite(ratio):  # inf without advantages, NaN in a broken batch: not for the log
        metrics["exploration_gradient_ratio"] = ratio
    metrics["exploration_weight"] = weight
    if plan.config.beta > 0:
        metrics["effective_alpha"] = weight / plan.config.beta
    metrics["time"] = {"step_s": seconds, "tokens_per_s": int((batch.mask != 0).sum()) / seconds}

    place = {"iteration": t, "step": state.steps_taken}
    alarms = state.guards.step(metrics)
    run.log("train_step", **place, **loggable(metrics), skipped_steps=state.guards.skipped_steps)
    state.steps_taken += 1
    here = state.position(t, step + 1)
    with run.clock.phase("checkpoint"):
        saves = ahead.is_done()  # asked once: it may end at any time
        if saves or any(alarm.action == "stop" for alarm in alarms):
            ahead.finish()  # an error that ended it is raised now, not at the iteration's end
            saves = True
        respond(alarms, here, place, log=run.log, progress=run.progress, batch=batch, about=metrics)
        run.progress.reached(here, saves=saves)


def train_supervised(
    policy: Policy,
    solutions: Sequence[PromptAndResponse],
    config: SFTConfig,
    *,
    pad_id: int,
    seed: int,
    log: Log,
    progress: Progress | None = None,
    guards: GuardsConfig | None = None,
    clock: PhaseClock | None = None,
) -> None:
    """``config.steps`` optimizer steps over seeded permutations of the solutions, whole batches only.

    progress: where to resume; None: at the beginning, and nothing is kept.
    guards: None: with their defaults. Raises StoppedByGuard where one of them ends the training.
    """
    progress, clock = progress or Progress(), clock or PhaseClock()
    watch = Guards(guards or GuardsConfig(), progress.start.guards)
    batch_size = min(config.batch_size, len(solutions))
    batches = (
        rows
        for epoch in count()
        for rows in minibatches(epoch_order(len(solutions), seed, epoch), batch_size)
        if len(rows) == batch_size
    )
    first = progress.start.step
    for step, rows in enumerate(islice(batches, first, config.steps), start=first):
        batch = build_batch([solutions[row] for row in rows], pad_id=pad_id)
        with clock.phase("train"):
            metrics = policy.train_step(batch, exploration_weight=0.0, grad_norm_limit=watch.grad_norm_limit)
        alarms = watch.step(metrics)
        log("sft_step", step=step, **loggable(metrics), skipped_steps=watch.skipped_steps)
        here = Position(step=step + 1, steps_taken=step + 1, guards=watch.state_dict())
        with clock.phase("checkpoint"):
            respond(alarms, here, {"step": step}, log=log, progress=progress, batch=batch, about=metrics)
            progress.reached(here)
