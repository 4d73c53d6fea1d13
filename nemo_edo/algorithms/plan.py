"""The settings of Algorithm 1, and what follows from them: each iteration's problems, its policies, its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.config import GRPOConfig, GuardsConfig, LoopConfig, SamplingConfig
from nemo_edo.data.batching import epoch_order
from nemo_edo.types import GenerationRequest, Problem, SamplingParams


@dataclass(frozen=True)
class Plan:
    """The settings of one training."""

    config: LoopConfig
    problems: Sequence[Problem]
    prompts: Mapping[str, tuple[int, ...]]
    """Token ids by problem id."""
    sampling: SamplingConfig
    seed: int
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    part_size: int = 2048
    """Responses that are put on disk at a time, and in process generated."""
    lag: int = 0
    """Iterations by which the sampling policy lags behind the trained one: 1 for one-step-off generation."""
    keeps_stale: bool = False
    """Whether to train on responses of earlier policies than an iteration asks for; False: they are an error."""

    def versions(self, t: int) -> range:
        """The policies that may have generated iteration t's responses; the last one is asked to."""
        asked = max(t - self.lag, 0)
        return range(0 if self.keeps_stale else asked, asked + 1)

    @property
    def collection_size(self) -> int:
        """Problems per collection."""
        return min(self.config.problems_per_iteration or len(self.problems), len(self.problems))

    def collection_problems(self, t: int) -> list[Problem]:
        """The problems of iteration t. A pass over the set is cut into whole collections, so that none has a problem
        twice;
        what remains of a pass is left out of it."""
        if self.collection_size == len(self.problems):
            return list(self.problems)
        rounds = len(self.problems) // self.collection_size
        order = epoch_order(len(self.problems), self.seed, t // rounds)
        start = t % rounds * self.collection_size
        return [self.problems[place] for place in order[start : start + self.collection_size]]

    def substitutes(self, t: int) -> list[Problem]:
        """The other problems, in an order that depends on seed and iteration: dynamic sampling replaces dropped groups
        from them."""
        collected = {problem.id for problem in self.collection_problems(t)}
        order = epoch_order(len(self.problems), self.seed, -1 - t)  # negative: no pass over the set has it
        return [self.problems[place] for place in order if self.problems[place].id not in collected]

    def requests(self, problems: Sequence[Problem], t: int) -> list[GenerationRequest]:
        """Iteration t's requests for the problems, ``samples_per_prompt`` each."""
        return sampling_requests(problems, self.prompts, self.sampling.samples_per_prompt, self.seed, "collect", t)

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(self.sampling.temperature, self.sampling.top_p, self.sampling.max_new_tokens)

    @property
    def is_dynamic(self) -> bool:
        """Whether groups whose rewards are all equal are dropped and replaced (DAPO)."""
        return isinstance(self.config, GRPOConfig) and self.config.dynamic_sampling

    @property
    def keeps_groups(self) -> bool:
        """Whether the responses to one prompt stay together when an epoch is shuffled."""
        return isinstance(self.config, GRPOConfig) and self.config.keep_groups

    @property
    def steps_per_collection(self) -> int:
        return steps_per_collection(self.config, len(self.problems), self.sampling.samples_per_prompt)

    @property
    def total_steps(self) -> int:
        """The length of learning-rate schedules: an upper bound, as collections may give fewer steps."""
        return self.config.iterations * self.steps_per_collection


def steps_per_collection(config: LoopConfig, problems: int, samples_per_prompt: int) -> int:
    """Optimizer steps on a whole collection from so many problems; dynamic sampling may leave fewer."""
    size = min(config.problems_per_iteration or problems, problems)
    return config.epochs * -(
        -size * (samples_per_prompt if isinstance(config, GRPOConfig) else 1) // config.minibatch_size
    )
