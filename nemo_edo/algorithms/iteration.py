"""Algorithm 1 of the paper: collect from the frozen policy, score, build, train, refit, evaluate, again.

An iteration samples for the whole prompt set from pi_t and then takes many optimizer steps on these samples. The
exploration term needs them: its expected gradient is zero while the policy equals its sampler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from tqdm import tqdm

from nemo_edo.algorithms.grpo import build_groups
from nemo_edo.algorithms.sampling import sampling_requests
from nemo_edo.algorithms.supervised import Log
from nemo_edo.config import GRPOConfig, SamplingConfig
from nemo_edo.data.batching import epoch_order, minibatches
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer, WeightSync
from nemo_edo.types import Problem, SamplingParams


@dataclass(frozen=True)
class Iteration:
    """Everything that Algorithm 1 works with."""

    policy: Policy
    engine: GenerationEngine
    weight_sync: WeightSync
    scorer: Scorer
    store: RolloutStore
    problems: Sequence[Problem]
    prompts: Mapping[str, tuple[int, ...]]
    grpo: GRPOConfig
    sampling: SamplingConfig
    pad_id: int
    seed: int
    log: Log
    write_rollouts: bool = True
    """True on the one rank that writes what all of them hold."""
    progress: str | None = None
    """The progress bar's label; None for no bar."""

    @property
    def collection_size(self) -> int:
        """Problems of one collection."""
        return min(self.grpo.problems_per_iteration or len(self.problems), len(self.problems))

    def collection_problems(self, t: int) -> list[Problem]:
        """Those of iteration t. A pass over the set is cut into whole collections, so that none holds a problem twice;
        what remains of a pass is left out of it."""
        if self.collection_size == len(self.problems):
            return list(self.problems)
        rounds = len(self.problems) // self.collection_size
        order = epoch_order(len(self.problems), self.seed, t // rounds)
        start = t % rounds * self.collection_size
        return [self.problems[place] for place in order[start : start + self.collection_size]]

    @property
    def steps_per_collection(self) -> int:
        responses = self.collection_size * self.sampling.samples_per_prompt
        return self.grpo.epochs * -(-responses // self.grpo.minibatch_size)

    @property
    def total_steps(self) -> int:
        return self.grpo.iterations * self.steps_per_collection


def run_iterations(run: Iteration, evaluate: Callable[[int], None]) -> None:
    """T iterations. ``evaluate(t)`` is called with pi_t before each of them, and with pi_T at the end."""
    _warn_of_single_steps(run)
    params = SamplingParams(run.sampling.temperature, run.sampling.top_p, run.sampling.max_new_tokens)
    evaluate(0)
    step = count()
    for t in tqdm(range(run.grpo.iterations), desc=run.progress, disable=run.progress is None):
        problems = run.collection_problems(t)
        requests = sampling_requests(problems, run.prompts, run.sampling.samples_per_prompt, run.seed, "collect", t)
        rollouts = run.engine.generate(requests, params)
        scored = run.scorer.score(rollouts, problems)
        if run.write_rollouts:
            run.store.write(t, scored, rank=0, world_size=1)  # on disk before anything is trained on
        collected = build_groups(scored, run.policy, run.grpo, pad_id=run.pad_id)
        run.log("collection", iteration=t, policy_version=t, **collected.statistics)
        for epoch in range(run.grpo.epochs):
            order = epoch_order(len(scored), run.seed, t * run.grpo.epochs + epoch)
            for rows in minibatches(order, run.grpo.minibatch_size):
                metrics = run.policy.train_step(collected.batch.rows(rows))
                run.log("train_step", iteration=t, step=next(step), **metrics)
        run.weight_sync.push(t + 1)
        evaluate(t + 1)


def _warn_of_single_steps(run: Iteration) -> None:
    if run.grpo.exploration_weight and run.steps_per_collection == 1:
        warnings.warn(
            "one optimizer step for each collection: while the policy equals its sampler the exploration term's "
            "expected gradient is zero, so it adds noise only; lower grpo.minibatch_size or raise grpo.epochs",
            stacklevel=3,
        )
