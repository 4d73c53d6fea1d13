from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad

from nemo_edo import losses
from nemo_edo.config import GRPOLossConfig
from nemo_edo.losses.exploration import first_tokens
from nemo_edo.losses.term import REDUCTIONS

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean-token-sum-norm"])
@few
@given(seed=st.integers(0, 1000), old_seed=st.integers(1001, 2000))
def test_expected_gradients_of_sums_are_zero_on_policy_and_of_the_noise_off_policy(policy, reduction, seed, old_seed):
    logits, other = policy.random_logits(seed), policy.logprobs(policy.random_logits(old_seed))

    def expected_gradient(term, old) -> Tensor:
        """By the exact expectation over pi_old: every response once, weighted by its probability."""
        options = {"reduction": reduction, "weights": policy.probabilities(old), "norm_length": 7}
        return grad(term(policy.logprobs(logits), old, policy.mask, **options).sum, logits)[0]

    close(expected_gradient(losses.exploration_term, policy.logprobs(logits)), torch.zeros_like(logits), atol=1e-14)
    close(expected_gradient(losses.exploration_noise_term, other), torch.zeros_like(logits), atol=1e-14)
    assert expected_gradient(losses.exploration_term, other).abs().max() > 1e-3


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_matrix_of_the_term_is_zero_at_padding_and_reduces_to_the_term(random_batch, reduction):
    batch = random_batch(7)
    options = {"log_ratio_floor": -0.2, "weights": batch.ref.exp()}
    old = torch.where(batch.mask == 1, batch.old, torch.nan)
    tensors = (batch.logprobs, old, batch.mask)
    matrix = losses.exploration_per_token(*tensors, **options)
    written_out = (batch.logprobs - batch.old).clamp(min=-0.2) * batch.ref.exp() * batch.mask
    torch.testing.assert_close(matrix, written_out, rtol=0, atol=0)
    found = losses.reduce_tokens(matrix, batch.mask, reduction, 7, rows="all")
    expected = losses.exploration_term(*tensors, reduction=reduction, norm_length=7, rows="all", **options)
    assert (found.sum, found.count) == (expected.sum, expected.count)
    assert torch.equal(*(grad(term.sum, batch.logprobs, retain_graph=True)[0] for term in (found, expected)))


@few
@given(seed=seeds, floor=st.floats(-0.6, -0.01))
def test_below_the_floor_the_value_is_the_floor_and_the_gradient_exactly_zero(random_batch, seed, floor):
    batch = random_batch(seed)
    term = losses.exploration_term(batch.logprobs, batch.old, batch.mask, reduction="token-mean", log_ratio_floor=floor)
    (gradient,) = grad(term.sum, batch.logprobs)
    log_ratio = (batch.logprobs - batch.old).detach()
    held = (log_ratio < floor) & (batch.mask == 1)
    assert torch.equal(gradient, torch.where(held, 0.0, batch.mask))
    torch.testing.assert_close(term.sum.detach(), (torch.where(held, floor, log_ratio) * batch.mask).sum())
    assert term.mean() >= floor
    share = losses.floor_share(batch.logprobs, batch.old, batch.mask, floor)
    assert (int(share.sum), int(share.count)) == (int(held.sum()), int(batch.mask.sum()))
    assert not share.sum.requires_grad


def test_first_tokens_are_those_of_the_response():
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 1, 1, 1]]) == 1
    assert first_tokens(mask, 2).tolist() == [[0, 1, 1, 0, 0], [1, 0, 1, 0, 0]]


# Gradients of ED-GRPO as exact expectations over all responses of a policy


def random_rewards(policy) -> Tensor:
    return torch.randn(len(policy.responses), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expected_grpo(policy, logits: Tensor, old_logits: Tensor, rewards_B: Tensor, **changes) -> Tensor:
    """grpo_loss over pi_old, which is the reference too, with exact advantages r - E_old[r]."""
    sums = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 1, "clip_low": 0.99, "clip_high": 99.0}
    config = GRPOLossConfig(**{"alpha": 0.0, **sums, **changes})
    logprobs, old = policy.logprobs(logits), policy.logprobs(old_logits.detach())
    p_old = policy.probabilities(old)
    advantages = rewards_B - (p_old * rewards_B).sum()
    rows = [slice(i, i + 1) for i in range(len(p_old))]
    terms = [losses.grpo_loss(logprobs[i], old[i], old[i], advantages[i], policy.mask[i], config)[0] for i in rows]
    return (p_old * torch.stack([term.mean() for term in terms])).sum()


def test_the_expected_gradient_of_grpo_is_that_of_minus_the_expected_reward(policy):
    logits, rewards = policy.random_logits(0), random_rewards(policy)
    (found,) = grad(expected_grpo(policy, logits, logits, rewards, beta=0.0), logits)
    (expected,) = grad(-(policy.probabilities(policy.logprobs(logits)) * rewards).sum(), logits)
    close(found, expected)


def test_ed_grpo_takes_grpos_first_step_and_then_moves_further_from_the_sampler(policy):
    rewards, old_logits = random_rewards(policy), policy.random_logits(0)

    def steps_of_one_iteration(**exploration) -> list[Tensor]:
        """The policies' probabilities, the sampler's first."""
        x, found = old_logits, []
        for _ in range(7):
            found.append(policy.probabilities(policy.logprobs(x)).detach())
            loss = expected_grpo(policy, x, old_logits, rewards, beta=0.05, **exploration)
            x = (x - 0.3 * grad(loss, x)[0]).detach().requires_grad_()
        return found

    plain, exploring = steps_of_one_iteration(), steps_of_one_iteration(alpha=None, exploration_coefficient=0.1)
    close(exploring[1], plain[1])
    near, far = ((p[0] * (p[0] / p[-1]).log()).sum() for p in (plain, exploring))  # KL from the sampler
    assert far > 1.05 * near > 0
