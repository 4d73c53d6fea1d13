"""An iteration's samples: generated and scored part by part, or read from stored rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_edo.algorithms.collection import by_problem, response_statistics
from nemo_edo.algorithms.grpo import keep_informative
from nemo_edo.algorithms.plan import Plan
from nemo_edo.errors import UserError
from nemo_edo.interfaces import GenerationEngine, Scorer
from nemo_edo.rollouts.resumable import InParts, generate_scored, require_version
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams, ScoredRollout


@dataclass(frozen=True)
class Samples:
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


def generate_samples(
    plan: Plan,
    t: int,
    *,
    engine: GenerationEngine,
    scorer: Scorer,
    store: RolloutStore,
    before_part: Callable[[], None],
) -> Samples:
    """Iteration t's samples; every part is on disk before the next begins, and what an earlier, killed process left
    there is not generated again. A bounded number of extra rounds replaces the groups that dynamic sampling drops.

    before_part: called before each part that is generated; it may raise RunStopped.
    """
    timed = TimedEngine(engine)
    answer = partial(
        generate_scored, engine=timed, scorer=scorer, sampling=plan.sampling_params, problems=plan.problems
    )
    in_parts = InParts(store, t, answer, part_size=plan.part_size, before_part=before_part, versions=plan.versions(t))
    scorer.begin(in_parts.earlier)
    everything = in_parts(plan.requests(plan.collection_problems(t), t))
    if not plan.is_dynamic:
        return Samples(everything, everything, timed.speed)
    kept, substitutes = keep_informative(everything), plan.substitutes(t)
    for _ in range(plan.config.max_extra_rounds):
        missing = plan.collection_size - len(kept) // plan.sampling.samples_per_prompt
        if not missing or not substitutes:
            break
        problems, substitutes = substitutes[:missing], substitutes[missing:]
        more = in_parts(plan.requests(problems, t))
        everything, kept = everything + more, kept + keep_informative(more)
    return Samples(everything, kept, timed.speed)


def stored_samples(plan: Plan, t: int, given: RolloutStore) -> Samples:
    """Iteration t's samples from another run's rollouts. Raises UserError where they do not fit this run."""
    everything = given.stored(t)
    _require_this_runs(plan, everything, t, str(given.folder))
    return Samples(everything, keep_informative(everything) if plan.is_dynamic else everything, {})


def _require_this_runs(plan: Plan, given: Sequence[ScoredRollout], t: int, where: str) -> None:
    """Given rollouts answer this run's problems, as its prompts pose them."""
    for rollout in (item.rollout for item in given):
        if rollout.problem_id not in plan.prompts:
            raise UserError(
                f"{where}: iteration {t} answers problem {rollout.problem_id}, which this run does not have"
            )
        there, here = rollout.prompt_ids, plan.prompts[rollout.problem_id]
        if there != here:
            raise UserError(
                f"{where}: iteration {t} answers {rollout.problem_id} after the prompt {there}, but this run's prompt "
                f"is {here}: the tokenizer or data.prompt differs"
            )
    require_version(given, t, plan.versions(t), where)


class TimedEngine:
    """A GenerationEngine that measures the tokens and seconds of another one."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.policy_version = engine.policy_version
        self._engine = engine
        self._tokens = 0
        self._seconds = 0.0

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        begun = time.monotonic()
        rollouts = self._engine.generate(requests, sampling)
        self._seconds += time.monotonic() - begun
        self._tokens += sum(len(rollout.response_ids) for rollout in rollouts)
        return rollouts

    @property
    def speed(self) -> dict[str, float]:
        """Seconds in the engine and response tokens per second; empty where nothing was generated."""
        if not self._tokens:
            return {}
        return {"sampling_s": self._seconds, "tokens_per_s": self._tokens / self._seconds}
