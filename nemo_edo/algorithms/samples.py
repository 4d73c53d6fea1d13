"""An iteration's samples: generated and scored part by part, be it while the one before trains, or read from stored
rollouts; and those of an older policy, which the exploration term may run over."""

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import cycle, islice
from threading import Event

import torch
import torch.nn.functional as F

from nemo_edo.algorithms.collection import Collected, by_problem, response_statistics
from nemo_edo.algorithms.grpo import keep_informative
from nemo_edo.algorithms.plan import Plan, sampling_requests
from nemo_edo.algorithms.services import Position, Services
from nemo_edo.config import ArmConfig, GRPOConfig
from nemo_edo.data.batching import build_batch, place_experts
from nemo_edo.errors import RunStopped, UserError
from nemo_edo.interfaces import PartWatch
from nemo_edo.rollouts.resumable import Parts, require_version
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Rollout, SamplingParams, ScoredRollout, TrainingBatch
from nemo_edo.utils.phases import PhaseClock


@dataclass(frozen=True)
class IterationSamples:
    """An iteration's scored samples, and what is logged about them."""

    everything: list[ScoredRollout]
    kept: list[ScoredRollout]
    """What is trained on: all samples except the groups that dynamic sampling drops."""
    speed: dict[str, float]
    """Speed of the engine in this process; empty where all responses were on disk."""

    @property
    def version(self) -> int:
        """The newest policy that generated any of them."""
        return max(item.rollout.policy_version for item in self.kept)

    def statistics(self, t: int) -> dict[str, float]:
        """The statistics of iteration t's groups, and of all responses if some were dropped."""
        groups = len(by_problem(self.everything))
        dropped = len(self.kept) < len(self.everything)
        return {
            **(response_statistics(self.everything) if dropped else {}),
            "groups": float(groups),
            "dropped_groups": float(groups - len(by_problem(self.kept))),
            "staleness": sum(t - item.rollout.policy_version for item in self.kept) / len(self.kept),
        }


def generate_and_score(run: Services, plan: Plan, here: Position) -> IterationSamples:
    """The scored samples of ``here.iteration``, which the store has when this returns. Raises UserError where they are
    another run's rollouts and do not answer this run's problems, as its prompts pose them."""
    t = here.iteration
    if run.given is None:
        samples = generate_samples(run, plan, t, _Collecting(run, here))
    else:
        everything, where = run.given.stored(t), str(run.given.folder)
        for rollout in (item.rollout for item in everything):
            if rollout.problem_id not in plan.prompts:
                raise UserError(
                    f"{where}: iteration {t} answers problem {rollout.problem_id}, which this run does not have"
                )
            there, own = rollout.prompt_ids, plan.prompts[rollout.problem_id]
            if there != own:
                raise UserError(
                    f"{where}: iteration {t} answers {rollout.problem_id} after the prompt {there}, but this run's "
                    f"prompt is {own}: the tokenizer or data.prompt differs"
                )
        require_version(everything, t, plan.versions(t), where)
        samples = IterationSamples(everything, keep_informative(everything) if plan.is_dynamic else everything, {})
    run.store.write(t, samples.everything)
    if not samples.kept:
        groups = len(samples.everything) // plan.sampling.samples_per_prompt
        raise UserError(
            f"iteration {t}: the rewards within each of the {groups} groups are equal, so dynamic sampling leaves "
            "nothing to train on; take easier or harder problems, or set dynamic_sampling=false"
        )
    return samples


def require_given(given: RolloutStore, config: ArmConfig, problems: int, samples_per_prompt: int) -> None:
    """Raises UserError where given rollouts cannot be read, or are of more problems, or of more responses to each, than
    the arm's collections have: a schedule of the learning rate would end before the training."""
    is_dynamic, groups_of = isinstance(config, GRPOConfig) and config.dynamic_sampling, []
    for t in range(config.iterations):
        table = given.read_table(t, ["problem_id", "reward"])
        rewards = table["reward"].cast("float32")  # as ``keep_informative`` compares them
        by_id = table.set_column(1, "reward", rewards).group_by("problem_id")
        groups = by_id.aggregate([("reward", name) for name in ("count", "min", "max")]).to_pylist()
        groups_of.append([g["reward_count"] for g in groups if not is_dynamic or g["reward_min"] < g["reward_max"]])
    most = max(map(len, groups_of))
    if most > problems:
        raise UserError(f"{given.folder}: an iteration is of {most} problems, and this run has {problems} to train on")
    for name, there, own in (
        ("sampling.samples_per_prompt", max(map(max, filter(None, groups_of)), default=0), samples_per_prompt),
        ("problems_per_iteration", most, config.problems_per_iteration or problems),
    ):
        if there > own:
            raise UserError(f"{given.folder}: an iteration has more than {name}={own} of this run: set it to {there}")


@dataclass(frozen=True)
class _Collecting:
    """The watch of a generation that the training waits for: it is saved before a part as before a step."""

    run: Services
    here: Position

    def begin_part(self) -> None:
        with self.run.clock.phase("checkpoint"):
            self.run.progress.reached(self.here)

    def alive(self) -> None:
        self.run.progress.alive()

    def stop_if_asked(self) -> None:
        self.run.progress.stop_if_asked()


def generate_samples(run: Services, plan: Plan, t: int, watch: PartWatch) -> IterationSamples:
    """Responses go to disk as they end, and those that an earlier, killed process left there are not generated again. A
    bounded number of extra rounds replaces the groups that dynamic sampling drops."""
    settings = plan.sampling
    sampling = SamplingParams(settings.temperature, settings.top_p, settings.max_new_tokens)
    parts = Parts(run.store, t, plan.versions(t), watch=watch, part_size=plan.part_size, clock=run.clock)
    asked, substitutes = plan.collection_problems(t), plan.substitutes(t) if plan.is_dynamic else []
    run.scorer.begin(parts.earlier, len(asked) * settings.samples_per_prompt)
    everything, kept = [], []
    for _ in range(1 + (plan.config.max_extra_rounds if plan.is_dynamic else 0)):
        requests = sampling_requests(asked, plan.prompts, settings.samples_per_prompt, plan.seed, "collect", t)
        more = parts.responses(requests, run.engine, run.scorer, sampling, plan.problems)
        everything += more
        kept += keep_informative(more) if plan.is_dynamic else more
        missing = plan.collection_size - len(kept) // settings.samples_per_prompt
        asked, substitutes = substitutes[:missing], substitutes[missing:]
        if not asked:
            break
    return IterationSamples(everything, kept, parts.speed)


def with_older_samples(collected: Collected, plan: Plan, store: RolloutStore, t: int) -> Collected:
    """Iteration t's collection with the samples that its exploration term runs over (``config.explored_iteration``).

    Samples of an older policy are ours, not the paper's: on samples of pi_theta itself the term's expected gradient is
    zero; on those of an older policy mu it is that of -KL(mu || pi_theta), which pushes the policy away from mu.

    Next to each response is one from the earlier iteration's rollouts, which share its minibatches: all of them, in an
    order that run seed and iteration fix, and again from the first where there are fewer. Their log-ratio, with its
    floor, and the noise control's ratio are against mu's log-probabilities as the engine gave them (``old_logprobs`` of
    these rows), so that no sampler correction applies. Where there is no earlier iteration, nothing explores.
    Raises UserError where the store has no rollouts of that iteration, or damaged ones.
    """
    source, size = plan.config.explored_iteration(t), len(collected.items)
    if source == t:
        return collected
    if source < 0:
        return replace(collected, batch=collected.batch.with_fields(exploration_factors=torch.zeros(size)))
    stored = store.stored(source)
    if not stored:
        raise UserError(
            f"{store.folder}: has no rollouts of iteration {source}, which iteration {t} explores from "
            f"(exploration_samples={plan.config.exploration_samples}); restore them from a copy"
        )
    order = random.Random(f"{plan.seed}, older samples {t}").sample(stored, len(stored))
    batch = _joined(collected.batch, [item.rollout for item in islice(cycle(order), size)])
    return replace(collected, batch=batch, items=[[*rows, size + item] for item, rows in enumerate(collected.items)])


def _joined(own: TrainingBatch, older: Sequence[Rollout]) -> TrainingBatch:
    """[2B, S]: B rows of the collection, then as many of an older policy, which only the exploration term reads."""
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in older]
    logprobs = [rollout.response_logprobs for rollout in older]
    before = own.tokens.shape[1]
    length = max(before, *(len(prompt) + len(response) for prompt, response in sequences))
    rows = build_batch(sequences, pad_id=0, length=length, old_logprobs=logprobs, sampler_logprobs=logprobs)
    experts = place_experts([rollout.routed_experts for rollout in older], sequences, length)
    if (experts is None) != (own.routed_experts is None):
        raise UserError(
            "some of the iterations' rollouts keep the experts of their tokens and others do not: sample them all with "
            "one setting of generation.routing_replay"
        )
    every = torch.ones(own.size)
    rows = rows.with_fields(exploration_factors=every, older=every, routed_experts=experts)
    joined = {}
    for name, value in own.with_fields(older=torch.zeros(own.size)).tensors().items():
        wide = F.pad(value, (*(0, 0) * (value.ndim - 2), 0, length - before)) if value.ndim > 1 else value
        joined[name] = torch.cat([wide, rows.tensors().get(name, torch.zeros_like(wide))])
    return TrainingBatch(**joined)


LOOKED_EVERY_S = 0.5
"""How often a training that waits for responses looks whether it is asked to stop."""


class Ahead:
    """One step off (``plan.lag``): the next iteration's samples are generated while this one trains, in a thread, which
    calls no worker: the main thread does. Without a lag nothing is generated here.

    Policy 0 generates those of iterations 0 and 1, policy t - 1 those of every later iteration t: it is the newest when
    generation begins. The thread puts parts on disk; the iteration then finds them there, as it does after a restart.
    """

    def __init__(self, run: Services, plan: Plan) -> None:
        self.speed: dict[str, float] = {}
        """Speed of the last finished generation."""
        self._run, self._plan = run, plan
        self._stop, self._waits = Event(), Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate ahead")
        self._running: Future | None = None

    def begin(self, iteration: int) -> None:
        """Starts to generate the iteration's samples; the previous generation has finished."""
        if self._plan.lag:
            own = replace(self._run, clock=PhaseClock())
            self._running = self._pool.submit(generate_samples, own, self._plan, iteration, watch=self)

    def is_done(self) -> bool:
        """Whether nothing is being generated."""
        return self._running is None or self._running.done()

    def finish(self) -> None:
        """Waits until all samples are on disk. Raises what ended their generation."""
        if self._running is not None:
            running, self._running = self._running, None
            self._waits.set()
            with self._run.clock.phase("wait"):
                while not wait([running], LOOKED_EVERY_S).done:
                    self._run.progress.stop_if_asked()
                self.speed = running.result().speed
            self._waits.clear()

    def close(self) -> None:
        """Ends the generation, done or not; its finished parts stay on disk."""
        self._stop.set()
        with self._run.clock.phase("wait"):
            self._pool.shutdown(wait=True)

    def alive(self) -> None:
        """A generation's sign of life counts while the training waits for it: otherwise that gives its own."""
        if self._waits.is_set():
            self._run.progress.alive()

    def begin_part(self) -> None:
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        if self._stop.is_set():
            raise RunStopped("stopped, with the responses that had ended saved")
