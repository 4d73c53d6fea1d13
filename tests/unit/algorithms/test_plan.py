"""Requests and their seeds; and warnings of exploration that cannot act and of collections that teach nothing."""

import pytest
import torch

from nemo_edo.algorithms.plan import collection_hazards, exploration_hazards, request_seed, sampling_requests
from nemo_edo.config import GRPOConfig, IDPOConfig
from nemo_edo.generation.sampling import choose_tokens
from nemo_edo.losses import exploration_term
from nemo_edo.types import Problem, SamplingParams

PROBLEMS = [Problem(name, "q", "#### 1", "1", "file:1") for name in ("train-2", "train-1")]
PROMPTS = {"train-1": (1,), "train-2": (2, 3)}


def test_a_samples_seed_does_not_depend_on_how_many_are_sampled_or_on_other_problems():
    few, many = (sampling_requests(problems, PROMPTS, samples, 42, "evaluate")
                 for problems, samples in ((PROBLEMS[:1], 2), (PROBLEMS, 10)))
    assert few == many[:2]


def test_the_seed_of_known_parts_never_changes():
    """Another value would make runs of an earlier version impossible to repeat."""
    assert request_seed(42, "collect", 0, "train-1", 0) == 7213978838430774035


GOOD = {"reward": 0.4, "zero_advantage_groups": 0.3, "truncated": 0.1}


@pytest.mark.parametrize(("changes", "config", "weight", "first", "said"), [
    ({"reward": 0.0, "zero_advantage_groups": 1.0}, GRPOConfig(), 0.0, True, ["data.chat_template"]),
    ({"zero_advantage_groups": 1.0}, GRPOConfig(), 0.0, True, ["sampling.samples_per_prompt"]),
    ({"zero_advantage_groups": 0.99}, GRPOConfig(), 0.1, True, []),
    ({"truncated": 0.51}, GRPOConfig(), 0.0, True, ["sampling.stop_token_ids"]),
    ({"truncated": 0.9}, GRPOConfig(), 0.0, False, []),
    ({"zero_advantage_groups": 1.0}, GRPOConfig(), 0.1, False, ["exploration term alone"]),
    ({"zero_advantage_groups": 1.0, "pairs": 1.0}, IDPOConfig(), 0.1, False, []),
    ({"pairs": 0.0}, IDPOConfig(), 0.1, False, ["no pair", "exploration term alone"]),
    ({"pairs": 0.0}, IDPOConfig(), 0.0, True, ["rewards.success_at", "no pair"])])
def test_what_a_collection_lacks_is_said_with_what_to_change(changes, config, weight, first, said):
    found = collection_hazards({**GOOD, **changes}, config, weight, first=first)
    assert len(found) == len(said) and all(words in hazard for words, hazard in zip(said, found, strict=True))


ONE_STEP, DROPPED = "one optimizer step for each collection", "dynamic_sampling"
OFF_BY_BETA, K1, PAIRED = "beta is 0", "kl_estimator k1", "exploration_samples is paired"


@pytest.mark.parametrize(("config", "steps", "expected"), [
    (GRPOConfig(), 4, []),
    (GRPOConfig(beta=0.0), 4, [OFF_BY_BETA]),
    (GRPOConfig(beta=0.0, alpha=0.0), 1, []),
    (GRPOConfig(beta=0.0, exploration_coefficient=0.1, dynamic_sampling=True), 1, [ONE_STEP, DROPPED]),
    (GRPOConfig(kl_estimator="k1", beta=0.04, alpha=0.5), 4, ["beta = 0.06 and alpha = 0"]),  # does the same
    (GRPOConfig(kl_estimator="k1", beta=0.04, exploration_samples="previous"), 1, [K1]),
    (GRPOConfig(exploration_samples="reference", dynamic_sampling=True), 1, []),  # off-policy from the first step on
    (GRPOConfig(kl_estimator="k1", alpha=0.0), 4, [K1]),
    (GRPOConfig(kl_estimator="k1+"), 4, []),
    (IDPOConfig(), 1, [ONE_STEP]),
    (IDPOConfig(exploration_samples="paired"), 4, [PAIRED]),
    (IDPOConfig(exploration_samples="paired", alpha=0.0), 4, [])])
def test_exploration_that_cannot_act_as_configured_is_reported_and_nothing_else(config, steps, expected: list[str]):
    told = exploration_hazards(config, steps)
    assert len(told) == len(expected)
    assert all(start in said for said, start in zip(told, expected, strict=True))
    if isinstance(config, GRPOConfig) and config.exploration_samples != "own":
        assert not any("the loss is that of GRPO" in said for said in told)
    cut = exploration_hazards(config, steps, top_p=0.9)
    assert any("sampling.top_p is 0.9" in said for said in cut) == bool(config.exploration_weight)


def test_on_policy_the_terms_gradient_is_noise_for_the_whole_distribution_and_a_push_for_a_cut_one():
    logits = torch.linspace(-2, 2, 12, requires_grad=True)
    rows, mask = logits.detach().expand(40_000, -1), torch.ones(40_000, 1)
    uniforms, norms = torch.rand(40_000, generator=torch.Generator().manual_seed(0)), {}
    for top_p in (1.0, 0.9):
        tokens, _ = choose_tokens(rows, uniforms, SamplingParams(1.0, top_p, 1))
        logprobs = logits.log_softmax(-1)[tokens][:, None]
        term = exploration_term(logprobs, logprobs.detach(), mask, reduction="seq-sum")
        norms[top_p] = float(torch.autograd.grad(term.mean(), logits)[0].norm())
    assert norms[1.0] < 0.006 and norms[0.9] > 0.03
