"""Algorithm 1 of the paper: collect from the frozen policy, score, build, train, refit, evaluate, again.

An iteration samples for the whole prompt set from pi_t and then takes many optimizer steps on these samples. The
exploration term needs them: its expected gradient is zero while the policy equals its sampler.

It can go on from between any two steps, and a collection from between any two of its parts (``progress.Progress``).
With an engine that has weights of its own, an iteration's samples may be drawn while the one before trains
(``ahead.Ahead``).
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Event
from typing import Any

from tqdm import tqdm

from nemo_edo.algorithms.ahead import Ahead, SavesBetween
from nemo_edo.algorithms.collection import Collected, Objective, by_problem, response_statistics, step_statistics
from nemo_edo.algorithms.grpo import keep_informative
from nemo_edo.algorithms.guards import Guards, exploration_hazards, loggable, respond
from nemo_edo.algorithms.progress import FromTheBeginning, Position, Progress
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.algorithms.supervised import Log
from nemo_edo.config import GRPOConfig, GuardsConfig, LoopConfig, SamplingConfig
from nemo_edo.data.batching import epoch_order, minibatches
from nemo_edo.data.drawing import DrawnInParts, draw_scored, require_version
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer, WeightSync
from nemo_edo.losses import NotFinite, Schedule, build_schedule
from nemo_edo.types import GenerationRequest, Problem, Rollout, SamplingParams, ScoredRollout, TrainingBatch


@dataclass(frozen=True)
class Iteration:
    """Everything that Algorithm 1 works with."""

    policy: Policy
    engine: GenerationEngine
    weight_sync: WeightSync
    scorer: Scorer
    store: RolloutStore
    objective: Objective
    problems: Sequence[Problem]
    prompts: Mapping[str, tuple[int, ...]]
    sampling: SamplingConfig
    seed: int
    log: Log
    write_rollouts: bool = True
    """True on the one rank that writes what all of them hold."""
    bar: str | None = None
    """The progress bar's label; None for no bar."""
    progress: Progress = field(default_factory=FromTheBeginning)
    part_size: int = 2048
    """Responses that are drawn, and put on disk, at a time."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    given: RolloutStore | None = None
    """Stored rollouts to train on; None: the policy's own are drawn."""
    keeps_stale: bool = False
    """Whether responses of earlier policies than an iteration asks for are trained on; False: they are an error."""
    ahead: Ahead | None = None
    """What draws the next iteration's responses while one trains (``draw_ahead``); None: each draws its own."""
    lag: int = 0
    """Iterations that the policy which draws is behind the one that trains: 1 with ``ahead``."""

    def versions(self, t: int) -> range:
        """The policies that the responses of iteration t may be of; the last one is asked for."""
        asked = max(t - self.lag, 0)
        return range(0 if self.keeps_stale else asked, asked + 1)

    @property
    def config(self) -> LoopConfig:
        return self.objective.config

    @property
    def collection_size(self) -> int:
        """Problems of one collection."""
        return min(self.config.problems_per_iteration or len(self.problems), len(self.problems))

    def collection_problems(self, t: int) -> list[Problem]:
        """Those of iteration t. A pass over the set is cut into whole collections, so that none holds a problem twice;
        what remains of a pass is left out of it."""
        if self.collection_size == len(self.problems):
            return list(self.problems)
        rounds = len(self.problems) // self.collection_size
        order = epoch_order(len(self.problems), self.seed, t // rounds)
        start = t % rounds * self.collection_size
        return [self.problems[place] for place in order[start : start + self.collection_size]]

    def substitutes(self, t: int) -> list[Problem]:
        """The other problems, in an order of seed and iteration: dynamic sampling replaces dropped groups from them."""
        collected = {problem.id for problem in self.collection_problems(t)}
        order = epoch_order(len(self.problems), self.seed, -1 - t)  # negative: the order of no pass over the set
        return [self.problems[place] for place in order if self.problems[place].id not in collected]

    @property
    def steps_per_collection(self) -> int:
        """Optimizer steps on a whole collection; dynamic sampling may leave fewer."""
        per_problem = self.sampling.samples_per_prompt if isinstance(self.config, GRPOConfig) else 1
        return self.config.epochs * -(-self.collection_size * per_problem // self.config.minibatch_size)

    @property
    def total_steps(self) -> int:
        """What learning-rate schedules run over: an upper bound, where collections may give fewer steps."""
        return self.config.iterations * self.steps_per_collection


def run_iterations(run: Iteration, evaluate: Callable[[int], None]) -> None:
    """T iterations. ``evaluate(t)`` is called with pi_t before each of them, and with pi_T at the end."""
    for hazard in exploration_hazards(run.config, run.steps_per_collection):
        warnings.warn(hazard, stacklevel=2)
    with contextlib.ExitStack() as stack:
        if run.ahead is not None:
            stack.callback(run.ahead.stop)
            run = replace(run, progress=SavesBetween(run.progress, run.ahead))
        _run_iterations(run, evaluate)


def _run_iterations(run: Iteration, evaluate: Callable[[int], None]) -> None:
    schedule = build_schedule(run.config.schedule, run.config.exploration_weight)
    start = run.progress.start
    guards = Guards(run.guards, start.guards)
    if start.schedule is not None:
        schedule.load_state_dict(start.schedule)
    if start.step == 0:  # within an iteration, the weights are of no version
        run.weight_sync.push(start.iteration)
    steps_taken = start.steps_taken
    iterations = range(start.iteration, run.config.iterations)
    total, label = run.config.iterations, run.bar
    for t in tqdm(iterations, desc=label, disable=label is None, initial=start.iteration, total=total):
        first = start.step if t == start.iteration else 0
        if first:
            collected = run.progress.kept(t)
        else:
            here = Position(t, 0, steps_taken, schedule.state_dict(), guards.state_dict())
            run.progress.reached(here)
            evaluate(t)
            collected = _prepare(run, here, guards)
        for step, batch in enumerate(_minibatches(run, collected, t, first), start=first):
            place = {"iteration": t, "step": steps_taken}
            metrics = _train_step(run, batch, schedule, guards.grad_norm_limit)
            alarms = guards.step(metrics)
            run.log("train_step", **place, **loggable(metrics), skipped_steps=guards.skipped_steps)
            steps_taken += 1
            here = Position(t, step + 1, steps_taken, schedule.state_dict(), guards.state_dict())
            respond(alarms, here, place, log=run.log, progress=run.progress, batch=batch, about=metrics)
            run.progress.reached(here)
        if run.ahead is not None:
            run.ahead.finish()  # before the engine has other weights
        run.weight_sync.push(t + 1)
    evaluate(run.config.iterations)


def _prepare(run: Iteration, here: Position, guards: Guards) -> Collected:
    """What the iteration trains on, built from fresh samples; the policy is pi_t."""
    if here.iteration:
        run.policy.move_reference(run.config.reference, run.config.ema_decay)
    samples = _collect(run, here)
    if run.ahead is not None and here.iteration + 1 < run.config.iterations:
        run.ahead.begin(here.iteration + 1)
    run.weight_sync.release()
    try:
        collected = run.objective.build(samples.kept, run.policy)
    except NotFinite as error:
        raise StoppedByGuard(
            f"iteration {here.iteration}: {error}: the policy gives its own samples no probability that is a number; "
            "lower optimizer.lr, or go back to an earlier policy"
        ) from error
    collected = replace(collected, statistics=collected.statistics | samples.statistics)
    run.log(
        "collection",
        iteration=here.iteration,
        policy_version=samples.version,
        **loggable(collected.statistics),
        time=samples.time,
    )
    alarms = guards.collection(collected.statistics)
    respond(alarms, here, {"iteration": here.iteration}, log=run.log, progress=run.progress)
    run.progress.keep(here.iteration, collected)
    return collected


def _minibatches(run: Iteration, collected: Collected, t: int, first: int) -> Iterator[TrainingBatch]:
    """The iteration's optimizer steps from the given one on."""
    config, keep_groups = run.config, getattr(run.config, "keep_groups", False)
    orders = (
        collected.order(run.seed, t * config.epochs + epoch, keep_groups=keep_groups) for epoch in range(config.epochs)
    )
    places = (
        (epoch, place, items)
        for epoch, order in enumerate(orders)
        for place, items in enumerate(minibatches(order, config.minibatch_size))
    )
    for epoch, place, items in islice(places, first, None):
        yield run.objective.minibatch(collected, items, f"{run.seed} {t} {epoch} {place}")


def _train_step(run: Iteration, batch: TrainingBatch, schedule: Schedule, grad_norm_limit: float) -> dict[str, Any]:
    """A step with the schedule's exploration weight, which the schedule then moves on: what is logged of it. A step
    that is skipped leaves the schedule where it is."""
    begun = time.monotonic()
    ratio = run.policy.exploration_gradient_ratio(batch) if schedule.needs_gradients else None
    weight, beta = schedule.weight, run.config.beta
    metrics = run.policy.train_step(batch, exploration_weight=weight, grad_norm_limit=grad_norm_limit)
    seconds = time.monotonic() - begun
    if not metrics["skipped"]:
        schedule.step(entropy=metrics["entropy"], gradient_ratio=ratio)
    # inf, of a batch without advantages, and NaN, of a broken one, are no numbers that a log takes.
    measured = {} if ratio is None or not math.isfinite(ratio) else {"exploration_gradient_ratio": ratio}
    measured |= {"exploration_weight": weight} | ({"effective_alpha": weight / beta} if beta > 0 else {})
    speed = {"step_s": seconds, "tokens_per_s": int((batch.mask != 0).sum()) / seconds}
    return {**metrics, **step_statistics(batch), **measured, "time": speed}


# --- samples ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """An iteration's scored samples, and what is logged of their collection."""

    kept: list[ScoredRollout]
    """What is trained on."""
    statistics: dict[str, float]
    """Those of all samples that were drawn, where they are not those of ``kept``, and of the groups."""
    time: dict[str, float]
    """Of the samples that this process has drawn; empty where all of them stood on disk."""

    @property
    def version(self) -> int:
        """The newest policy that drew any of them."""
        return max(item.rollout.policy_version for item in self.kept)


def collect_iteration(run: Iteration, here: Position) -> list[ScoredRollout]:
    """Draws the samples of ``here.iteration`` alone; ``run_iterations`` finds them on disk."""
    run.weight_sync.push(here.iteration)
    return _collect(run, here).kept


def draw_ahead(run: Iteration, t: int, stop: Event) -> dict[str, float]:
    """Puts the parts of iteration t's samples on disk, where ``_collect`` finds them, and returns the speed.

    Store and engine of ``run`` are its process's alone: no other rank takes part. Raises RunStopped once ``stop`` is
    set.
    """
    drawing = _Drawing(replace(run, progress=_EndsWhenTold(stop)), Position(t))
    drawn = drawing.draw(run.collection_problems(t))
    if _is_dynamic(run):
        _replace_uninformative(run, drawing, drawn)
    return drawing.speed


class _EndsWhenTold(FromTheBeginning):
    """A Progress that may stop wherever it is told to."""

    def __init__(self, stop: Event) -> None:
        self._stop = stop

    def reached(self, position: Position, *, saves: bool = True) -> None:
        if self._stop.is_set():
            raise RunStopped(f"asked to stop: what was drawn for iteration {position.iteration} is saved")


def _is_dynamic(run: Iteration) -> bool:
    return getattr(run.config, "dynamic_sampling", False)


def _collect(run: Iteration, here: Position) -> Samples:
    """The scored samples of ``here.iteration``. All that were drawn are on disk before any is trained on.

    What an earlier, killed process has drawn is taken from there.
    """
    t, dynamic, speed = here.iteration, _is_dynamic(run), {}
    if run.given is not None:
        drawn = run.given.drawn(t)
        _require_this_runs(run, drawn, t)
        kept = keep_informative(drawn) if dynamic else drawn
    else:
        drawing = _Drawing(run, here)
        drawn = kept = drawing.draw(run.collection_problems(t))
        if dynamic:
            kept, drawn = _replace_uninformative(run, drawing, drawn)
        speed = drawing.speed or ({} if run.ahead is None else run.ahead.speed)
    if run.write_rollouts:
        run.store.write(t, drawn, rank=0, world_size=1)
    if not kept:
        raise UserError(
            f"iteration {t}: the rewards of all {len(drawn) // run.sampling.samples_per_prompt} groups are all equal, "
            "so dynamic sampling leaves nothing to train on; easier or harder problems, or dynamic_sampling=false"
        )
    groups = len(by_problem(drawn))
    statistics = {
        "groups": float(groups),
        "dropped_groups": float(groups - len(by_problem(kept))),
        "staleness": sum(t - item.rollout.policy_version for item in kept) / len(kept),
    }
    return Samples(kept, (response_statistics(drawn) if len(kept) < len(drawn) else {}) | statistics, speed)


def _replace_uninformative(
    run: Iteration, drawing: _Drawing, drawn: list[ScoredRollout]
) -> tuple[list[ScoredRollout], list[ScoredRollout]]:
    """(samples of informative groups, all samples drawn): a bounded number of rounds replaces what was dropped."""
    kept, substitutes = keep_informative(drawn), run.substitutes(drawing.here.iteration)
    for _ in range(run.config.max_extra_rounds):
        missing = run.collection_size - len(kept) // run.sampling.samples_per_prompt
        if not missing or not substitutes:
            break
        round_problems, substitutes = substitutes[:missing], substitutes[missing:]
        more = drawing.draw(round_problems)
        drawn, kept = drawn + more, kept + keep_informative(more)
    return kept, drawn


class _Drawing:
    """Draws an iteration's samples in parts of a fixed size, each on disk before the next is begun."""

    def __init__(self, run: Iteration, here: Position) -> None:
        self.run = run
        self.here = here
        self._in_parts = DrawnInParts(
            run.store,
            here.iteration,
            self._answer,
            part_size=run.part_size,
            writes=run.write_rollouts,
            before_part=lambda: run.progress.reached(here),
            versions=run.versions(here.iteration),
        )
        self._tokens = 0
        self._seconds = 0.0
        """Spent in the engine on ``_tokens`` response tokens."""

    @property
    def speed(self) -> dict[str, float]:
        if not self._tokens:
            return {}
        return {"sampling_s": self._seconds, "tokens_per_s": self._tokens / self._seconds}

    def draw(self, problems: Sequence[Problem]) -> list[ScoredRollout]:
        run, t = self.run, self.here.iteration
        requests = sampling_requests(problems, run.prompts, run.sampling.samples_per_prompt, run.seed, "collect", t)
        return self._in_parts(requests)

    def _answer(self, requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
        run = self.run
        params = SamplingParams(run.sampling.temperature, run.sampling.top_p, run.sampling.max_new_tokens)

        def draw() -> list[Rollout]:
            begun = time.monotonic()
            rollouts = run.engine.generate(requests, params)
            self._seconds += time.monotonic() - begun
            self._tokens += sum(len(rollout.response_ids) for rollout in rollouts)
            return rollouts

        return draw_scored(draw, run.scorer, run.problems)


def _require_this_runs(run: Iteration, given: Sequence[ScoredRollout], t: int) -> None:
    """Given rollouts answer this run's problems, as its prompts pose them."""
    where = str(run.given.folder)
    for rollout in (item.rollout for item in given):
        if rollout.problem_id not in run.prompts:
            raise UserError(f"{where}: iteration {t} answers problem {rollout.problem_id}, which is none of this run's")
        there, here = rollout.prompt_ids, run.prompts[rollout.problem_id]
        if there != here:
            raise UserError(
                f"{where}: iteration {t} answers {rollout.problem_id} after the prompt {there} there, which is {here} "
                "here: another tokenizer, or another data.prompt"
            )
    require_version(given, t, run.versions(t), where)
