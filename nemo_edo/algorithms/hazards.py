"""Warnings about what keeps a run from learning: settings that cannot act, and collections without a signal."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_edo.algorithms.plan import steps_per_collection
from nemo_edo.config import GRPOConfig, IDPOConfig, LoopConfig
from nemo_edo.config.training import ONE_STEP
from nemo_edo.errors import UserError

MANY_TRUNCATED = 0.5
"""A first collection with a larger share of truncated responses has a cause that training does not remove."""
LOOK = "look at them in the run's rollouts"


def require_several_steps(arms: Mapping[str, LoopConfig], problems: int, samples_per_prompt: int) -> None:
    """Raises UserError for an arm whose exploration term can only add noise, unless its settings allow that by name."""
    for name, config in arms.items():
        steps = steps_per_collection(config, problems, samples_per_prompt)
        if _only_adds_noise(config, steps) and not config.allow_one_step:
            raise UserError(
                f"arm {name}: {ONE_STEP} (minibatch_size {config.minibatch_size}, {problems} training problems): while "
                "the policy equals its sampler the exploration term's expected gradient is zero, so that it would add "
                "noise only; lower minibatch_size, raise epochs, set alpha=0, or set allow_one_step=true in its section"
            )


def _only_adds_noise(config: LoopConfig, steps: int) -> bool:
    of_older = isinstance(config, GRPOConfig) and config.exploration_samples != "own"
    return bool(config.exploration_weight) and steps == 1 and not of_older


def exploration_hazards(config: LoopConfig, steps: int, top_p: float = 1.0) -> list[str]:
    """Where the exploration term cannot act as configured, or something else acts like it, each with the reason.

    steps: for each collection. top_p: of the sampling (``sampling.top_p``)."""
    weight, found = config.exploration_weight, []
    if isinstance(config, GRPOConfig):
        found += _hazards_of_kl(config)
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


def _hazards_of_kl(config: GRPOConfig) -> list[str]:
    found = []
    if not config.beta and config.effective_alpha:
        found.append(
            f"beta is 0, and with it the exploration weight alpha * beta: alpha = {config.effective_alpha:g} does "
            "nothing; give the weight itself, exploration_coefficient=..., or alpha=0 if no exploration is meant"
        )
    plain = config.exploration_control == "none" and config.kl_importance == "none"
    if config.kl_estimator == "k1" and config.beta and plain:
        weight = config.exploration_weight if config.exploration_samples == "own" else 0.0
        both = config.beta + weight
        same = f": without a floor, the loss is that of GRPO with beta = {both:g} and alpha = 0" if weight else ""
        found.append(
            "kl_estimator k1 in the loss: its gradient is the exploration term's own, zero on average where the policy "
            f"equals its sampler, so the KL does not hold the policy{same}; kl_estimator=k3 keeps the two apart"
        )
    return found


def collection_hazards(statistics: Mapping[str, float], config: LoopConfig, weight: float, *, first: bool) -> list[str]:
    """Why a collection teaches nothing, each with the likely causes; its first one also says what is wrong from the
    start.

    statistics: of the collection (``response_statistics``); weight: the exploration weight of its steps.
    """
    found = []
    equal_groups = statistics.get("zero_advantage_groups") == 1
    if first and statistics.get("reward") == 0:
        found.append(
            "no response to the first prompts earned a reward. Likely causes: answers in another form than the "
            "scorer's (data.prompt, data.answer_format), a chat template that is missing or not this model's "
            f"(data.chat_template), responses that are cut (sampling.max_new_tokens), or too hard a task; {LOOK}"
        )
    elif first and equal_groups:
        found.append(
            "within each group of the first collection all rewards are equal, so no response is better than another. "
            "Take easier or harder problems, or raise sampling.samples_per_prompt"
        )
    if first and statistics.get("truncated", 0.0) > MANY_TRUNCATED:
        found.append(
            f"{statistics['truncated']:.0%} of the first collection's responses reached the length limit. Likely "
            "causes: an end token that the model writes and the run does not know (sampling.stop_token_ids), a chat "
            "template that is not this model's (data.chat_template), or too small a sampling.max_new_tokens; "
            f"{LOOK}"
        )
    if equal_groups and isinstance(config, IDPOConfig):
        found.append(
            "the collection has no pair of a better and a worse response: the preference loss has nothing to train on"
        )
    if equal_groups and weight:
        found.append(
            "all rewards within each group are equal, so the exploration term alone moves the policy: nothing holds it "
            "to right answers. Take easier or harder problems, or set the exploration weight to 0 until some are solved"
        )
    return found
