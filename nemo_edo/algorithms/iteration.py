"""Algorithm 1 of the paper: collect from the frozen policy, score, build, train, refit, evaluate, again.

An iteration samples for the whole prompt set from pi_t and then takes many optimizer steps on these samples. The
exploration term needs them: its expected gradient is zero while the policy equals its sampler.

It can go on from between any two steps, and a collection from between any two of its parts (``progress.Progress``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tqdm import tqdm

from nemo_edo.algorithms.collection import Collected, Objective
from nemo_edo.algorithms.grpo import keep_informative
from nemo_edo.algorithms.progress import FromTheBeginning, Position, Progress
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.algorithms.supervised import Log
from nemo_edo.config import GRPOConfig, LoopConfig, SamplingConfig
from nemo_edo.data.batching import epoch_order, minibatches
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import UserError
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer, WeightSync
from nemo_edo.losses import Schedule, build_schedule
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout, TrainingBatch


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
    given: RolloutStore | None = None
    """Stored rollouts to train on; None: the policy's own are drawn."""

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
        return self.config.iterations * self.steps_per_collection


def run_iterations(run: Iteration, evaluate: Callable[[int], None]) -> None:
    """T iterations. ``evaluate(t)`` is called with pi_t before each of them, and with pi_T at the end."""
    _warn_of_exploration_that_cannot_act(run)
    schedule = build_schedule(run.config.schedule, run.config.exploration_weight)
    start = run.progress.start
    if start.schedule is not None:
        schedule.load_state_dict(start.schedule)
    if start.iteration:
        run.weight_sync.push(start.iteration)
    steps_taken = start.steps_taken
    iterations = range(start.iteration, run.config.iterations)
    total, label = run.config.iterations, run.bar
    for t in tqdm(iterations, desc=label, disable=label is None, initial=start.iteration, total=total):
        first = start.step if t == start.iteration else 0
        if first:
            collected = run.progress.kept(t)
        else:
            here = Position(t, 0, steps_taken, schedule.state_dict())
            run.progress.reached(here)
            evaluate(t)
            collected = _prepare(run, here)
        for step, batch in enumerate(_minibatches(run, collected, t, first), start=first):
            metrics = _train_step(run.policy, batch, schedule)
            run.log("train_step", iteration=t, step=steps_taken, **metrics)
            steps_taken += 1
            run.progress.reached(Position(t, step + 1, steps_taken, schedule.state_dict()))
        run.weight_sync.push(t + 1)
    evaluate(run.config.iterations)


def _prepare(run: Iteration, here: Position) -> Collected:
    """What the iteration trains on, built from fresh samples; the policy is pi_t."""
    if here.iteration:
        run.policy.move_reference(run.config.reference, run.config.ema_decay)
    collected = run.objective.build(_collect(run, here), run.policy)
    run.log("collection", iteration=here.iteration, policy_version=here.iteration, **collected.statistics)
    run.progress.keep(here.iteration, collected)
    return collected


def _minibatches(run: Iteration, collected: Collected, t: int, first: int) -> Iterator[TrainingBatch]:
    """The iteration's optimizer steps from the given one on."""
    places = (
        (epoch, place, items)
        for epoch in range(run.config.epochs)
        for place, items in enumerate(
            minibatches(
                epoch_order(len(collected.items), run.seed, t * run.config.epochs + epoch), run.config.minibatch_size
            )
        )
    )
    for epoch, place, items in islice(places, first, None):
        yield run.objective.minibatch(collected, items, f"{run.seed} {t} {epoch} {place}")


def _train_step(policy: Policy, batch: TrainingBatch, schedule: Schedule) -> dict[str, float]:
    """A step with the schedule's exploration weight, which the schedule then moves on."""
    ratio = policy.exploration_gradient_ratio(batch) if schedule.needs_gradients else None
    weight = schedule.weight
    metrics = policy.train_step(batch, exploration_weight=weight)
    schedule.step(entropy=metrics["entropy"], gradient_ratio=ratio)
    # inf, of a batch without advantages, says nothing and is no number that a log takes.
    measured = {} if ratio is None or math.isinf(ratio) else {"exploration_gradient_ratio": ratio}
    return {**metrics, **measured, "exploration_weight": weight}


# --- samples ------------------------------------------------------------------------------------------------------


def collect_iteration(run: Iteration, here: Position) -> list[ScoredRollout]:
    """Draws the samples of ``here.iteration`` alone; ``run_iterations`` finds them on disk."""
    if here.iteration:
        run.weight_sync.push(here.iteration)
    return _collect(run, here)


def _collect(run: Iteration, here: Position) -> list[ScoredRollout]:
    """The scored samples of ``here.iteration`` that are trained on. All that were drawn are on disk before.

    What an earlier, killed process has drawn is taken from there.
    """
    t, dynamic = here.iteration, getattr(run.config, "dynamic_sampling", False)
    if run.given is not None:
        drawn = run.given.drawn(t)
        _require_this_runs(run, drawn, t)
        kept = keep_informative(drawn) if dynamic else drawn
    else:
        drawing = _Drawing(run, here, run.store.drawn(t))
        drawn = kept = drawing.draw(run.collection_problems(t))
        if dynamic:
            kept, drawn = _replace_uninformative(run, drawing, drawn)
    if run.write_rollouts:
        run.store.write(t, drawn, rank=0, world_size=1)
    if not kept:
        raise UserError(
            f"iteration {t}: the rewards of all {len(drawn) // run.sampling.samples_per_prompt} groups are all equal, "
            "so dynamic sampling leaves nothing to train on; easier or harder problems, or dynamic_sampling=false"
        )
    return kept


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

    def __init__(self, run: Iteration, here: Position, on_disk: list[ScoredRollout]) -> None:
        self.run = run
        self.here = here
        self._on_disk = on_disk
        self._taken = 0
        """Responses of ``on_disk`` that were asked for."""
        self._parts = 0

    def draw(self, problems: Sequence[Problem]) -> list[ScoredRollout]:
        run, t = self.run, self.here.iteration
        requests = sampling_requests(problems, run.prompts, run.sampling.samples_per_prompt, run.seed, "collect", t)
        parts = [self._part(part, problems) for part in minibatches(requests, run.part_size)]
        return [scored for part in parts for scored in part]

    def _part(self, requests: list[GenerationRequest], problems: Sequence[Problem]) -> list[ScoredRollout]:
        run, t = self.run, self.here.iteration
        part = self._on_disk[self._taken : self._taken + len(requests)]
        if part:
            _require_answers(part, requests, t, str(run.store.folder))
            self._taken += len(part)
        else:
            run.progress.reached(self.here)
            params = SamplingParams(run.sampling.temperature, run.sampling.top_p, run.sampling.max_new_tokens)
            part = run.scorer.score(run.engine.generate(requests, params), problems)
            if run.write_rollouts:
                run.store.write_part(t, self._parts, part)
        self._parts += 1
        return part


def _require_answers(
    scored: Sequence[ScoredRollout], requests: Sequence[GenerationRequest], t: int, where: str
) -> None:
    """What was found on disk are the very responses that are asked for."""
    if len(scored) != len(requests):
        raise UserError(f"{where}: iteration {t} has {len(scored)} of a part's {len(requests)} responses there")
    for item, request in zip(scored, requests, strict=True):
        for name in ("problem_id", "sample_index", "prompt_ids", "seed"):
            there, here = getattr(item.rollout, name), getattr(request, name)
            if there != here:
                raise UserError(
                    f"{where}: iteration {t} has a response with {name} {there} there where {here} is asked for here; "
                    "they are another run's, or the problems have changed"
                )
    _require_version(scored, t, where)


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
    _require_version(given, t, where)


def _require_version(scored: Sequence[ScoredRollout], t: int, where: str) -> None:
    strange = next((item.rollout for item in scored if item.rollout.policy_version != t), None)
    if strange is not None:
        raise UserError(
            f"{where}: a response of iteration {t} is of policy version {strange.policy_version} there; version {t} "
            "is trained on here"
        )


def _warn_of_exploration_that_cannot_act(run: Iteration) -> None:
    if not run.config.exploration_weight:
        return
    if run.steps_per_collection == 1:
        warnings.warn(
            "one optimizer step for each collection: while the policy equals its sampler the exploration term's "
            "expected gradient is zero, so it adds noise only; lower minibatch_size or raise epochs",
            stacklevel=3,
        )
    if getattr(run.config, "dynamic_sampling", False):
        warnings.warn(
            "dynamic_sampling drops groups whose rewards are all equal, and these carry much of the exploration "
            "term's effect; it acts on the others only",
            stacklevel=3,
        )
