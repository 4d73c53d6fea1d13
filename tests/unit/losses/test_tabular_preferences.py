"""Where losses on preferences, data and rankings lead, if they see every response in exact proportions: the policy's
responses can all be listed (tests/helpers/tabular.py)."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from nemo_edo.config import DPOLossConfig
from nemo_edo.losses import (
    bradley_terry_loss,
    dpo_loss,
    ed_idpo_loss,
    ipo_loss,
    ranking_nce_loss,
    selm_loss,
    sequence_logprobs,
    sft_loss,
    vpo_loss,
    xpo_loss,
)

tabular = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tabular.py")))

BETA = 0.7
STRENGTHS = torch.tensor([3, 1, 2, 1, 5, 1, 2, 2, 1, 4, 1, 3, 2, 1, 1])  # of the responses, exp(r) of Bradley-Terry


@pytest.fixture(scope="module")
def policy(enumerable_policy):
    assert len(enumerable_policy.responses) == len(STRENGTHS)
    return enumerable_policy


def pairs_of(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of chosen and rejected responses, in which i beats j counts[i, j] times."""
    chosen, rejected = counts.fill_diagonal_(0).nonzero(as_tuple=True)
    repeats = counts[chosen, rejected]
    return chosen.repeat_interleave(repeats), rejected.repeat_interleave(repeats)


def bradley_terry_pairs() -> tuple[Tensor, Tensor]:
    """i beats j in the proportion STRENGTHS[i] : STRENGTHS[j], which is exactly the model's with r = log(strength)."""
    return pairs_of(STRENGTHS[:, None].expand(-1, len(STRENGTHS)).clone())


def pair_arguments(policy, logits: Tensor, ref_logits: Tensor, pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    responses = (sequence_logprobs(policy.logprobs(x), policy.mask) for x in (logits, ref_logits.detach()))
    return tuple(logprobs[side] for logprobs in responses for side in pairs)


def tilted_reference(policy, ref_logits: Tensor, exponents_B: Tensor) -> Tensor:
    weights = tabular.probabilities(policy, ref_logits).detach() * exponents_B.double().exp()
    return weights / weights.sum()


def test_dpo_on_bradley_terry_preferences_ends_at_the_tilted_reference(policy):
    ref_logits, pairs = policy.random_logits(1), bradley_terry_pairs()
    logits = tabular.minimised(
        lambda x: dpo_loss(*pair_arguments(policy, x, ref_logits, pairs), beta=BETA).mean(), policy.random_logits(2)
    )
    tabular.close(
        tabular.probabilities(policy, logits), tilted_reference(policy, ref_logits, STRENGTHS.log() / BETA), atol=1e-7
    )


def test_ipo_ends_at_the_reference_tilted_by_the_probability_of_winning(policy):
    """With P(i beats j) = 1/2 + (u_i - u_j)/2, half the square's target 1/beta goes to u (Azar et al. 2024, eq. 7)."""
    ref_logits, quarters = policy.random_logits(1), STRENGTHS - 1  # u = quarters / 4
    pairs = pairs_of(4 + quarters[:, None] - quarters[None, :])
    logits = tabular.minimised(
        lambda x: ipo_loss(*pair_arguments(policy, x, ref_logits, pairs), beta=BETA).mean(), policy.random_logits(2)
    )
    tabular.close(
        tabular.probabilities(policy, logits),
        tilted_reference(policy, ref_logits, quarters / 4 / (2 * BETA)),
        atol=1e-7,
    )


def biased(policy, ref_logits: Tensor, sampler_logits: Tensor, pairs, method: str, alpha: float):
    """DPO with the method's exploration term, its expectation taken over the sampler; a function of the logits."""
    old = policy.logprobs(sampler_logits.detach())
    p_sampler, ref = policy.probabilities(old), sequence_logprobs(policy.logprobs(ref_logits.detach()), policy.mask)

    def objective(x: Tensor) -> Tensor:
        arguments, logprobs = pair_arguments(policy, x, ref_logits, pairs), policy.logprobs(x)
        responses = sequence_logprobs(logprobs, policy.mask)
        scale = {"beta": BETA, "alpha": alpha}
        if method == "ed-idpo":
            config = DPOLossConfig(**scale)
            weights = p_sampler * len(p_sampler)  # the mean over all responses is then the expectation
            preference, bias, _ = ed_idpo_loss(*arguments, logprobs, old, policy.mask, config, sample_weights=weights)
            return preference.mean() + bias.mean()
        one = {
            "xpo": lambda i: xpo_loss(*arguments, responses[i], **scale)[1],
            "selm": lambda i: selm_loss(*arguments, responses[i], ref[i], **scale)[1],
            "vpo online": lambda i: vpo_loss(*arguments, responses[i], ref[i], setting="online", **scale)[1],
            "vpo offline": lambda i: vpo_loss(*arguments, responses[i], ref[i], setting="offline", **scale)[1],
        }[method]
        return dpo_loss(*arguments, beta=BETA).mean() + tabular.exact(p_sampler, one)

    return objective


@pytest.mark.parametrize(("method", "moves_away"), [
    ("ed-idpo", True), ("xpo", True), ("selm", True), ("vpo online", True), ("vpo offline", False),
])  # fmt: skip
def test_optimism_ends_further_from_its_sampler_than_without_and_pessimism_nearer(policy, method, moves_away):
    ref_logits, pairs = policy.random_logits(1), bradley_terry_pairs()
    sampler_logits = ref_logits if method == "xpo" else policy.random_logits(3)
    start = tabular.minimised(
        lambda x: dpo_loss(*pair_arguments(policy, x, ref_logits, pairs), beta=BETA).mean(), policy.random_logits(2)
    )
    ends = {alpha: tabular.minimised(biased(policy, ref_logits, sampler_logits, pairs, method, alpha), start)
            for alpha in (0.0, 0.02)}  # fmt: skip
    p_sampler = tabular.probabilities(policy, sampler_logits).detach()
    far, further = (tabular.kl(p_sampler, tabular.probabilities(policy, end)) for end in ends.values())
    assert (further > far + 1e-3) if moves_away else (further < far - 1e-3)


def test_the_bias_of_each_method_is_its_coefficient_times_the_samplers_expected_log_probability(policy):
    ref_logits, sampler_logits, pairs = policy.random_logits(1), policy.random_logits(3), bradley_terry_pairs()
    logits, p_sampler = policy.random_logits(4), tabular.probabilities(policy, sampler_logits).detach()
    (unit,) = grad((p_sampler * sequence_logprobs(policy.logprobs(logits), policy.mask)).sum(), logits)
    coefficients = {"ed-idpo": BETA, "xpo": 1.0, "selm": BETA, "vpo online": BETA, "vpo offline": -BETA}
    for method, coefficient in coefficients.items():
        with_bias, without = (
            grad(biased(policy, ref_logits, sampler_logits, pairs, method, alpha)(logits), logits)[0]
            for alpha in (0.02, 0.0)
        )
        tabular.close(with_bias - without, 0.02 * coefficient * unit)


def test_supervised_fine_tuning_ends_at_the_frequencies_of_the_data(policy):
    data = torch.arange(len(STRENGTHS)).repeat_interleave(STRENGTHS)
    logits = tabular.minimised(
        lambda x: sft_loss(policy.logprobs(x)[data], policy.mask[data]).mean(), policy.random_logits(0)
    )
    tabular.close(tabular.probabilities(policy, logits), STRENGTHS / STRENGTHS.sum().double(), atol=1e-7)


def test_bradley_terry_scores_differ_by_the_log_odds_of_winning():
    chosen, rejected = bradley_terry_pairs()
    scores = tabular.minimised(
        lambda x: bradley_terry_loss(x[chosen], x[rejected]).mean(), tabular.normal(0, len(STRENGTHS))
    )
    tabular.close(scores - scores[0], STRENGTHS.double().log() - STRENGTHS[0].log(), atol=1e-7)


def ranked_questions() -> tuple[Tensor, Tensor]:
    """STRENGTHS[i] questions whose positive is i, with all others as negatives: [Q] and [Q, K] indices."""
    positives = torch.arange(len(STRENGTHS)).repeat_interleave(STRENGTHS)
    return positives, torch.stack([torch.cat([torch.arange(p), torch.arange(p + 1, 15)]) for p in positives.tolist()])


def test_the_softmax_of_ranking_nce_scores_is_the_chance_of_being_positive():
    positives, negatives = ranked_questions()
    scores = tabular.minimised(
        lambda x: ranking_nce_loss(x[positives], x[negatives]).mean(), tabular.normal(0, len(STRENGTHS))
    )
    tabular.close(scores.softmax(0), STRENGTHS / STRENGTHS.sum().double(), atol=1e-7)


def test_uniform_ranking_nce_with_a_penalty_ends_where_its_linear_equations_say():
    positives, negatives = ranked_questions()
    scores = tabular.minimised(
        lambda x: ranking_nce_loss(x[positives], x[negatives], l2=0.3, weighting="uniform").mean(),
        tabular.normal(0, 15),
    )
    positive = STRENGTHS / STRENGTHS.sum().double()
    negative = (1 - positive) / 14
    tabular.close(scores, (positive - negative) / (2 * 0.3 * (positive + negative)), atol=1e-7)
