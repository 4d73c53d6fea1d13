"""The settings of Algorithm 1, and what follows from them: each iteration's problems, its policies, its steps."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_edo.config import ArmConfig, GRPOConfig, GuardsConfig, IDPOConfig, SamplingConfig
from nemo_edo.config.training import ONE_STEP
from nemo_edo.data.batching import epoch_order
from nemo_edo.errors import UserError
from nemo_edo.types import GenerationRequest, Problem


@dataclass(frozen=True)
class Plan:
    """The settings of one training."""

    config: ArmConfig
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
        """The policies that may have generated iteration t's responses: where they are generated ahead and lost, the
        iteration's own generates them again."""
        return range(0 if self.keeps_stale else max(t - self.lag, 0), t + 1)

    @property
    def collection_size(self) -> int:
        """Problems per collection."""
        return min(self.config.problems_per_iteration or len(self.problems), len(self.problems))

    def collection_problems(self, t: int) -> list[Problem]:
        """The problems of iteration t. A pass over the set is cut into whole collections, so that none has a problem
        twice; what remains of a pass is left out of it."""
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

    @property
    def is_dynamic(self) -> bool:
        """Whether groups whose rewards are all equal are dropped and replaced (DAPO)."""
        return isinstance(self.config, GRPOConfig) and self.config.dynamic_sampling

    @property
    def steps_per_collection(self) -> int:
        return steps_per_collection(self.config, len(self.problems), self.sampling.samples_per_prompt)

    @property
    def total_steps(self) -> int:
        """The length of learning-rate schedules: an upper bound, as collections may give fewer steps."""
        return self.config.iterations * self.steps_per_collection


def steps_per_collection(config: ArmConfig, problems: int, samples_per_prompt: int) -> int:
    """Optimizer steps on a whole collection from so many problems; dynamic sampling may leave fewer."""
    size = min(config.problems_per_iteration or problems, problems)
    items = size * (samples_per_prompt if isinstance(config, GRPOConfig) else 1)
    return config.epochs * -(-items // config.minibatch_size)


def request_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part (run seed, purpose, iteration, problem, sample) and nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_requests(
    problems: Sequence[Problem], prompts: Mapping[str, tuple[int, ...]], samples: int, *seed_parts: object
) -> list[GenerationRequest]:
    """``samples`` requests for each problem, problem by problem."""
    return [
        GenerationRequest(problem.id, index, prompts[problem.id], request_seed(*seed_parts, problem.id, index))
        for problem in problems
        for index in range(samples)
    ]


MANY_TRUNCATED = 0.5
"""A first collection with a larger share of truncated responses has a cause that training does not remove."""
LOOK = "look at them in the run's rollouts"


def require_several_steps(arms: Mapping[str, ArmConfig], problems: int, samples_per_prompt: int) -> None:
    """Raises UserError for an arm whose exploration term can only add noise, unless its settings allow that by name."""
    for name, config in arms.items():
        steps = steps_per_collection(config, problems, samples_per_prompt)
        if _only_adds_noise(config, steps) and not config.allow_one_step:
            raise UserError(
                f"arm {name}: {ONE_STEP} (minibatch_size {config.minibatch_size}, {problems} training problems with "
                f"sampling.samples_per_prompt={samples_per_prompt}): while the policy equals its sampler the "
                "exploration term's expected gradient is zero, so that it would add noise only; in its section set "
                "minibatch_size to half of the responses or less, epochs=2, alpha=0, or allow_one_step=true"
            )


def _only_adds_noise(config: ArmConfig, steps: int) -> bool:
    of_older = isinstance(config, GRPOConfig) and config.exploration_samples != "own"
    return bool(config.exploration_weight) and steps == 1 and not of_older


def exploration_hazards(config: ArmConfig, steps: int, top_p: float = 1.0) -> list[str]:
    """Where the exploration term cannot act as configured, or something else acts like it, each with the reason.

    steps: for each collection. top_p: of the sampling (``sampling.top_p``)."""
    weight, found = config.exploration_weight, []
    if isinstance(config, GRPOConfig):
        if not config.beta and config.effective_alpha:
            found.append(
                f"beta is 0, and with it the exploration weight alpha * beta: alpha = {config.effective_alpha:g} does "
                "nothing; give the weight itself, exploration_coefficient=..., or alpha=0 if no exploration is meant"
            )
        plain = config.exploration_control == "none" and config.kl_importance == "none"
        if config.kl_estimator == "k1" and config.beta and plain:
            own = weight if config.exploration_samples == "own" else 0.0
            both = config.beta + own
            same = f": without a floor, the loss is that of GRPO with beta = {both:g} and alpha = 0" if own else ""
            found.append(
                "kl_estimator k1 in the loss: its gradient is the exploration term's own, zero on average where the "
                f"policy equals its sampler, so the KL does not hold the policy{same}; kl_estimator=k3 keeps the two "
                "apart"
            )
    if not weight:
        return found
    if top_p < 1:
        found.append(
            f"sampling.top_p is {top_p:g}: the responses are of a cut distribution and their log-probabilities of the "
            "whole one, so the exploration term's gradient is not zero on average where the policy equals its sampler; "
            "it pushes from what was kept towards what was cut off; sampling.top_p=1 is the method's"
        )
    of_older = isinstance(config, GRPOConfig) and config.exploration_samples != "own"
    if _only_adds_noise(config, steps):
        found.append(
            f"{ONE_STEP}: while the policy equals its sampler the exploration term's "
            "expected gradient is zero, so it adds noise only; lower minibatch_size or raise epochs"
        )
    if isinstance(config, GRPOConfig) and config.dynamic_sampling and not of_older:
        found.append(
            "dynamic_sampling drops groups whose rewards are all equal, and these carry much of the exploration "
            "term's effect; it acts on the others only"
        )
    if isinstance(config, IDPOConfig) and config.exploration_samples == "paired":
        found.append(
            "exploration_samples is paired: pairs have right and wrong responses in equal numbers, not as often as "
            "the sampler generates them, so the term's gradient is not zero on average where the policy equals its "
            "sampler; exploration_samples=all is the method's term"
        )
    return found


def collection_hazards(statistics: Mapping[str, float], config: ArmConfig, weight: float, *, first: bool) -> list[str]:
    """Why a collection teaches nothing, each with the likely causes; its first one also says what is wrong from the
    start.

    statistics: of the collection (``response_statistics``); weight: the exploration weight of its steps.
    """
    found = []
    if isinstance(config, IDPOConfig):
        alike, why = statistics.get("pairs") == 0, "no prompt has both a success (rewards.success_at) and a failure"
    else:
        alike, why = statistics.get("zero_advantage_groups") == 1, "within each group all rewards are equal"
    if first and statistics.get("reward") == 0:
        found.append(
            "no response to the first prompts earned a reward. Likely causes: answers in another form than the "
            "scorer's (data.prompt, data.answer_format), a chat template that is missing or not this model's "
            f"(data.chat_template), responses that are cut (sampling.max_new_tokens), or too hard a task; {LOOK}"
        )
    elif first and alike:
        found.append(
            f"in the first collection {why}, so no response is better than another. "
            "Take easier or harder problems, or raise sampling.samples_per_prompt"
        )
    if first and statistics.get("truncated", 0.0) > MANY_TRUNCATED:
        found.append(
            f"{statistics['truncated']:.0%} of the first collection's responses reached the length limit. Likely "
            "causes: an end token that the model writes and the run does not know (sampling.stop_token_ids), a chat "
            "template that is not this model's (data.chat_template), or too small a sampling.max_new_tokens; "
            f"{LOOK}"
        )
    if alike and isinstance(config, IDPOConfig):
        found.append(
            "the collection has no pair of a better and a worse response: the preference loss has nothing to train on"
        )
    if alike and weight:
        found.append(
            f"{why}, so the exploration term alone moves the policy: nothing holds it "
            "to right answers. Take easier or harder problems, or set the exploration weight to 0 until some are solved"
        )
    return found
