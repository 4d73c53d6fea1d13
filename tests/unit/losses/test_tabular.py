"""The closed forms that the method rests on, and where policy gradients and exploration lead a policy whose responses
can all be listed (tests/helpers/tabular.py)."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad

from nemo_edo.losses import (
    GRPOLossConfig,
    clip_cov_selection,
    entropy_bonus,
    exploration_diagnostics,
    exploration_term,
    group_advantages,
    grpo_loss,
    kl_cov_selection,
    novelty_advantages,
    pass_at_k_advantages,
    redundancy_shares,
    sequence_logprobs,
    token_covariances,
    truncated_importance_weights,
)
from nemo_edo.metrics import entropy_from_logits

tabular = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tabular.py")))

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
BETA = 0.7
TOKEN_SUMS = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 1, "clip_low": 0.99, "clip_high": 99.0}


@pytest.fixture(scope="module")
def policy(enumerable_policy):
    return enumerable_policy


@few
@given(seed=seeds)
def test_no_policy_has_a_higher_regularised_reward_than_the_tilted_reference(policy, seed):
    rewards, ref = (
        tabular.normal(seed, len(policy.responses)),
        tabular.probabilities(policy, policy.random_logits(seed + 1)).detach(),
    )
    z = (ref * (rewards / BETA).exp()).sum()
    tilted = ref * (rewards / BETA).exp() / z

    def objective(p: Tensor) -> float:
        return (p * rewards).sum().item() - BETA * tabular.kl(p, ref)

    assert math.isclose(objective(tilted), BETA * z.log().item(), abs_tol=1e-12)
    assert all(
        objective(tabular.probabilities(policy, policy.random_logits(s)).detach()) < objective(tilted) for s in range(5)
    )


@few
@given(seed=seeds, shift=st.floats(-3, 3))
def test_j_star_is_the_log_ratio_form_plus_the_samplers_mean_reward_whatever_the_shift(policy, seed, shift):
    """So fixing E_old[r] = 0 takes the shift away, and the log-ratio form is J*, here as the diagnostics report it."""
    ref_logits, old_logits = policy.random_logits(seed).detach(), policy.random_logits(seed + 1).detach()
    rewards, p_old = tabular.normal(seed + 2, len(policy.responses)), tabular.probabilities(policy, old_logits)
    logits, value = tabular.optimum(policy, tabular.at_last_token(policy, rewards), ref_logits, BETA)
    shifted_logits, shifted_value = tabular.optimum(
        policy, tabular.at_last_token(policy, rewards + shift), ref_logits, BETA
    )
    tabular.close(tabular.probabilities(policy, shifted_logits), tabular.probabilities(policy, logits))
    tabular.close(shifted_value, value + shift)
    pi_r, old, ref = (policy.logprobs(x) for x in (logits, old_logits, ref_logits))
    log_ratio_form = tabular.exact(
        p_old, lambda i: exploration_diagnostics(pi_r[i], old[i], ref[i], policy.mask[i], beta=BETA)["j_star"]
    )
    tabular.close(log_ratio_form, value - (p_old * rewards).sum())
    normalised = tabular.at_last_token(policy, rewards - (p_old * rewards).sum())
    tabular.close(log_ratio_form, tabular.optimum(policy, normalised, ref_logits, BETA)[1])


@few
@given(seed=seeds)
def test_token_rewards_telescope_into_log_ratios_and_the_value_of_the_root(policy, seed):
    """The paper's token-level derivation: sum_t r = beta sum_t log(pi_r / pi_ref) + V*(root), and E_old of it."""
    table, ref_logits = (
        tabular.normal(seed, len(policy.row), policy.VOCABULARY),
        policy.random_logits(seed + 1).detach(),
    )
    logits, value = tabular.optimum(policy, table, ref_logits, BETA)
    tabular.close(logits.exp().sum(-1), torch.ones(len(policy.row), dtype=torch.float64))
    pi_r, ref = policy.logprobs(logits), policy.logprobs(ref_logits)
    returns = tabular.path_sums(policy, table)
    tabular.close(BETA * (sequence_logprobs(pi_r, policy.mask) - sequence_logprobs(ref, policy.mask)) + value, returns)
    tilted = policy.probabilities(ref) * (returns / BETA).exp()
    tabular.close(policy.probabilities(pi_r), tilted / tilted.sum())
    p_old = tabular.probabilities(policy, policy.random_logits(seed + 2)).detach()
    log_ratio_form = tabular.exact(
        p_old, lambda i: exploration_diagnostics(pi_r[i], pi_r[i], ref[i], policy.mask[i], beta=BETA)["j_star"]
    )
    tabular.close(log_ratio_form, value - (p_old * returns).sum())


def expected_grpo(policy, logits, old_logits, ref_logits, rewards_B, config: GRPOLossConfig) -> Tensor:
    """grpo_loss over pi_old, with exact advantages r - E_old[r]."""
    logprobs, old, ref = (policy.logprobs(x) for x in (logits, old_logits.detach(), ref_logits.detach()))
    p_old = policy.probabilities(old)
    advantages = rewards_B - (p_old * rewards_B).sum()
    return tabular.exact(
        p_old, lambda i: grpo_loss(logprobs[i], old[i], ref[i], advantages[i], policy.mask[i], config)[0]
    )


def grpo_config(**changes) -> GRPOLossConfig:
    return GRPOLossConfig(**{"alpha": 0.0, **TOKEN_SUMS, **changes})


def test_the_expected_gradient_of_grpo_is_that_of_minus_the_expected_reward(policy):
    logits, rewards = policy.random_logits(0), tabular.normal(1, len(policy.responses))
    (found,) = grad(expected_grpo(policy, logits, logits, logits, rewards, grpo_config(beta=0.0)), logits)
    (expected,) = grad(-(tabular.probabilities(policy, logits) * rewards).sum(), logits)
    tabular.close(found, expected)


def tilted_node(q: Tensor, ref: Tensor) -> Tensor:
    """Where k2 holds: log(pi / ref) = q / beta + constant."""
    return (ref.log() + q / BETA).softmax(0)


def mixed_node(q: Tensor, ref: Tensor) -> Tensor:
    """Where k3 holds: pi (q - v) = beta (pi - ref), with the v that makes pi = beta ref / (beta + v - q) sum to 1."""
    low, high = q.max() - BETA, q.max() + BETA
    for _ in range(100):
        v = (low + high) / 2
        low, high = (v, high) if (BETA * ref / (BETA + v - q)).sum() > 1 else (low, v)
    return BETA * ref / (BETA + v - q)


@pytest.mark.parametrize(("estimator", "node"), [
    ("k2", tilted_node), ("k3", mixed_node), ("k1+", tilted_node), ("k3+", tilted_node),
])  # fmt: skip
def test_grpo_rests_where_reward_and_the_estimators_kl_balance_at_every_node(policy, estimator, node):
    """q is the reward to come without its KL: a sampled token's estimate answers for its own node alone."""
    ref_logits, rewards = policy.random_logits(0), tabular.normal(1, len(policy.responses))
    ref = ref_logits.detach().softmax(-1)

    def solve(q: Tensor, row: int) -> tuple[Tensor, Tensor]:
        p = node(q, ref[row])
        return p.log(), (p * q).sum()

    resting, value = tabular.backward(policy, tabular.at_last_token(policy, rewards), solve)
    tabular.close((tabular.probabilities(policy, resting) * rewards).sum(), value)
    assert value > (tabular.probabilities(policy, ref_logits) * rewards).sum() + 0.1

    def gradient_at(logits: Tensor) -> Tensor:
        logits = logits.detach().requires_grad_()
        config = grpo_config(beta=BETA, kl_estimator=estimator)
        return grad(expected_grpo(policy, logits, logits, ref_logits, rewards, config), logits)[0]

    tabular.close(gradient_at(resting), torch.zeros_like(resting))
    nudge = 1e-3 * tabular.normal(2, *resting.shape)
    assert (gradient_at(resting + nudge) * nudge).sum() > 0  # and comes back to it


@pytest.mark.parametrize(("estimator", "share_left"), [("k1", 1.0), ("k2", 0.2), ("k3", 0.2), ("k1+", 0.2)])
def test_the_kl_penalty_pulls_towards_the_reference_except_by_k1_whose_gradient_is_zero(policy, estimator, share_left):
    ref_logits, start = policy.random_logits(0), policy.random_logits(1)
    no_reward = torch.zeros(len(policy.responses), dtype=torch.float64)
    config = grpo_config(beta=1.0, kl_estimator=estimator)
    *_, end = tabular.descended(
        lambda x: expected_grpo(policy, x, x, ref_logits, no_reward, config), start, lr=1.0, steps=20
    )
    p_ref = tabular.probabilities(policy, ref_logits).detach()
    before, after = (tabular.kl(tabular.probabilities(policy, x).detach(), p_ref) for x in (start, end))
    assert math.isclose(after, before, rel_tol=1e-9) if share_left == 1 else after < share_left * before


def iteration(policy, rewards_B: Tensor, *, sign: int = 1, **changes) -> list[Tensor]:
    """Policies over the steps of one iteration, whose samples stay those of its first policy."""
    old_logits, config = policy.random_logits(0), grpo_config(beta=0.05, **changes)
    return tabular.descended(
        lambda x: sign * expected_grpo(policy, x, old_logits, old_logits, rewards_B, config),
        old_logits,
        lr=0.3,
        steps=6,
    )


def test_ed_grpo_raises_the_reward_where_the_papers_argmin_without_a_minus_lowers_it(policy):
    rewards = tabular.normal(1, len(policy.responses))
    ours, printed = (
        [(tabular.probabilities(policy, x) * rewards).sum().item() for x in iteration(policy, rewards, sign=sign)]
        for sign in (1, -1)
    )
    assert ours == sorted(ours) and ours[-1] > ours[0] + 0.1
    assert printed == sorted(printed, reverse=True) and printed[-1] < printed[0] - 0.1


def test_ed_grpo_goes_where_grpo_does_in_its_first_step_and_further_from_the_sampler_after_it(policy):
    rewards = tabular.normal(1, len(policy.responses))
    plain, exploring = iteration(policy, rewards), iteration(policy, rewards, alpha=None, exploration_coefficient=0.1)
    tabular.close(exploring[1], plain[1])
    p_old, p, further = (tabular.probabilities(policy, x) for x in (plain[0], plain[-1], exploring[-1]))
    assert tabular.kl(p_old, further) > 1.05 * tabular.kl(p_old, p)


def test_the_exploration_term_alone_drives_the_policy_ever_further_from_its_sampler(policy):
    old_logits = policy.random_logits(0)
    old = policy.logprobs(old_logits.detach())
    p_old = policy.probabilities(old)
    path = tabular.descended(
        lambda x: exploration_term(policy.logprobs(x), old, policy.mask, reduction="seq-sum", weights=p_old).sum,
        old_logits + 0.1 * tabular.normal(1, *old_logits.shape), lr=0.3, steps=60,
    )  # fmt: skip
    distances = [tabular.kl(p_old, tabular.probabilities(policy, x)) for x in path]
    assert distances == sorted(distances) and distances[-1] > 10 * distances[0] > 0


def test_the_floored_exploration_term_comes_to_rest_and_the_plain_one_does_not(policy):
    old_logits, sampled = policy.random_logits(0), torch.tensor([4, 11])
    old = policy.logprobs(old_logits.detach())

    def log_ratios_along(floor: float | None) -> list[Tensor]:
        """Of the sampled tokens, over many steps on the same sample."""
        path = tabular.descended(
            lambda x: exploration_term(policy.logprobs(x)[sampled], old[sampled], policy.mask[sampled],
                                       reduction="seq-sum", log_ratio_floor=floor).sum,
            old_logits, lr=0.1, steps=100,
        )  # fmt: skip
        return [(policy.logprobs(x) - old)[sampled][policy.mask[sampled] == 1] for x in path]

    floored, plain = log_ratios_along(-0.5), log_ratios_along(None)
    assert torch.equal(floored[100], floored[50])
    assert ((floored[100] < -0.5) & (floored[100] > -0.8)).all()
    assert (plain[100] < plain[50] - 1).all()


def test_sequence_weights_turn_samples_of_another_policy_into_the_samplers_expectation(policy):
    logits, old_logits, mu_logits = (policy.random_logits(seed) for seed in range(3))
    logprobs, old, mu = policy.logprobs(logits), policy.logprobs(old_logits.detach()), policy.logprobs(mu_logits)
    weights = truncated_importance_weights(old, mu.detach(), policy.mask, cap=1e6, level="sequence")

    def gradient(p_sampler: Tensor, weights: Tensor) -> Tensor:
        weights = p_sampler.detach()[:, None] * weights
        term = exploration_term(logprobs, old, policy.mask, reduction="seq-sum", weights=weights)
        return grad(term.sum, logits, retain_graph=True)[0]

    tabular.close(gradient(policy.probabilities(mu), weights), gradient(policy.probabilities(old), policy.mask))


def test_the_entropy_bonus_alone_ends_at_uniform_tokens(policy):
    def objective(x: Tensor) -> Tensor:
        entropies = entropy_from_logits(torch.nan_to_num(policy.position_logits(x)))
        return entropy_bonus(entropies, policy.mask, reduction="token-mean").mean()

    end = tabular.minimised(objective, policy.random_logits(0)).softmax(-1)
    tabular.close(end, torch.full_like(end, 1 / policy.VOCABULARY), atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_and_kl_cov_lose_less_entropy_than_grpo_on_the_same_samples(policy, seed):
    """The likelier half of the responses is right: covariances are positive, and entropy falls."""
    old_logits = policy.random_logits(seed)
    p_old = tabular.probabilities(policy, old_logits).detach()
    sampled = p_old.multinomial(64, replacement=True, generator=torch.Generator().manual_seed(seed))
    mask, old = policy.mask[sampled], policy.logprobs(old_logits.detach())[sampled]
    right = (p_old >= p_old.median()).double()[sampled]
    advantages = group_advantages(right, [0] * len(sampled))
    covariances = token_covariances(old, advantages, mask)
    selections = {
        "none": None,
        "clip-cov": clip_cov_selection(covariances, mask, share=0.2, low=0.2, high=5.0, seed=seed),
        "kl-cov": kl_cov_selection(covariances, mask, share=0.2),
    }

    def entropy_after(control: str) -> float:
        config = GRPOLossConfig(alpha=0.0, beta=0.0, covariance_control=control)
        *_, end = tabular.descended(
            lambda x: grpo_loss(policy.logprobs(x)[sampled], old, None, advantages, mask, config,
                                selected=selections[control])[0].mean(),
            old_logits, lr=0.5, steps=10,
        )  # fmt: skip
        p = tabular.probabilities(policy, end)
        return -(p * p.log()).sum().item()

    plain, clipped, held = (entropy_after(control) for control in selections)
    before = -(p_old * p_old.log()).sum().item()
    assert plain < before - 0.05
    assert min(clipped, held) > plain + 0.005


def all_groups(size: int) -> tuple[Tensor, Tensor]:
    """[size + 1, size] answers 0 or 1 of all groups but for their order, and in how many orders each comes."""
    answers = torch.tensor([[int(i < ones) for i in range(size)] for ones in range(size + 1)])
    return answers, torch.tensor([math.comb(size, ones) for ones in range(size + 1)])


def expected_over_groups(x: Tensor, answers: Tensor, orders: Tensor, advantages: Tensor) -> Tensor:
    """The GRPO loss, token sums over all groups that the policy softmax(x) may sample, by their probabilities."""
    logprobs = x.log_softmax(0)[answers.flatten()][:, None]
    chance = orders * logprobs.detach().view(answers.shape).sum(1).exp()
    weighted = advantages * chance.repeat_interleave(answers.shape[1])
    config = GRPOLossConfig(alpha=0.0, beta=0.0)
    return grpo_loss(logprobs, logprobs.detach(), None, weighted, torch.ones_like(logprobs), config)[0].sum


@pytest.mark.parametrize(("size", "k"), [(4, 1), (4, 2), (6, 4), (3, 3)])
def test_unscaled_pass_at_k_advantages_have_the_expected_gradient_of_pass_at_k(size, k):
    """With advantages times their group's s, it is (G/k - 1) grad [1 - (1 - p)^k] for G samples; zero for k = G."""
    answers, orders = all_groups(size)
    group_ids = torch.arange(len(answers)).repeat_interleave(size)
    advantages = pass_at_k_advantages(answers.flatten().double(), group_ids, k)
    pass_rate = 1 - torch.tensor([math.comb(size - n, k) for n in range(size + 1)]).double() / math.comb(size, k)
    unscaled = advantages * (pass_rate * (1 - pass_rate)).sqrt().repeat_interleave(size)
    x = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    (found,) = grad(-expected_over_groups(x, answers, orders, unscaled), x)
    (expected,) = grad(1 - x.softmax(0)[0] ** k, x)
    tabular.close(found, (size / k - 1) * expected)


def test_pass_at_k_advantages_end_at_a_higher_pass_at_k_than_mean_rewards():
    """A policy that does not see which of two kinds of prompts it has; answer 0 is right for two thirds of them.

    Always answering 0 has the highest mean reward, two thirds, and no higher pass@k; answering 1 in a third of the
    cases has the highest pass@2, seven ninths.
    """
    size, k = 4, 2
    answers, orders = all_groups(size)
    both_kinds, group_ids = answers.repeat(2, 1), torch.arange(2 * len(answers)).repeat_interleave(size)
    rewards = torch.cat([answers == 0, answers == 1]).flatten().double()
    weights = torch.cat([orders * 2 / 3, orders / 3]).double()

    def ascended(advantages: Tensor) -> Tensor:
        *_, end = tabular.descended(
            lambda x: expected_over_groups(x, both_kinds, weights, advantages),
            torch.tensor([-1.0, 1.0], dtype=torch.float64), lr=1.0, steps=80,
        )  # fmt: skip
        return end.softmax(0)

    mean = ascended(group_advantages(rewards, group_ids))
    best_of_k = ascended(pass_at_k_advantages(rewards, group_ids, k))
    assert mean[1] < 0.05
    assert 0.25 < best_of_k[1] < 0.45


NOVELTY_GROUP = torch.tensor([0, 0, 0, 1, 2, 2])  # the answers of a group: path 0 thrice, path 1 once; 2 is wrong
NOVELTY_CORRECT = NOVELTY_GROUP < 2


def logit_steps(advantages: Tensor) -> Tensor:
    """The direction in which GRPO moves the logits of the three answers, from the uniform policy."""
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logprobs = x.log_softmax(0)[NOVELTY_GROUP][:, None]
    config = GRPOLossConfig(alpha=0.0, beta=0.0)
    term, _ = grpo_loss(logprobs, logprobs.detach(), None, advantages, torch.ones_like(logprobs), config)
    return -grad(term.sum, x)[0]


def test_novelty_advantages_move_logits_from_the_repeated_to_the_rare_correct_path_only():
    groups = [0] * len(NOVELTY_GROUP)
    advantages = group_advantages(NOVELTY_CORRECT.double(), groups)
    shares = redundancy_shares(NOVELTY_GROUP, NOVELTY_CORRECT.double(), groups)
    novel = novelty_advantages(advantages, shares, NOVELTY_CORRECT, groups, strength=0.5)
    moved = logit_steps(novel) - logit_steps(advantages)
    # Shares are 2/3 thrice and 0; their mean 1/2. The repeated path loses 3 * (2/3 - 1/2) / 2, the rare one wins it.
    tabular.close(moved, torch.tensor([-0.25, 0.25, 0.0], dtype=torch.float64))
    assert (logit_steps(novel)[:2] > 0).all() and logit_steps(novel)[2] < 0


def test_exploration_weighted_by_redundancy_lowers_the_repeated_correct_path_alone():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logprobs = x.log_softmax(0)[NOVELTY_GROUP][:, None]
    shares = redundancy_shares(NOVELTY_GROUP, NOVELTY_CORRECT.double(), [0] * len(NOVELTY_GROUP))
    mask = torch.ones_like(logprobs)
    term = exploration_term(logprobs, logprobs.detach(), mask, reduction="seq-sum", weights=shares)
    step = -grad(term.sum, x)[0]
    assert step[0] < 0 and step[1] > 0 and math.isclose(step[1], step[2])
