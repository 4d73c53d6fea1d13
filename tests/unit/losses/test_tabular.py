"""Gradients of ED-GRPO as exact expectations over all responses of a policy."""

from functools import partial

import torch
from torch import Tensor
from torch.autograd import grad

from nemo_edo.losses import GRPOLossConfig, grpo_loss

close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_grpo(policy, logits: Tensor, old_logits: Tensor, rewards_B: Tensor, **changes) -> Tensor:
    """grpo_loss over pi_old, which is the reference too, with exact advantages r - E_old[r]."""
    sums = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 1, "clip_low": 0.99, "clip_high": 99.0}
    config = GRPOLossConfig(**{"alpha": 0.0, **sums, **changes})
    logprobs, old = policy.logprobs(logits), policy.logprobs(old_logits.detach())
    p_old = policy.probabilities(old)
    advantages = rewards_B - (p_old * rewards_B).sum()
    losses = []
    for i in range(len(p_old)):
        row = slice(i, i + 1)
        losses.append(grpo_loss(logprobs[row], old[row], old[row], advantages[row], policy.mask[row], config)[0].mean())
    return (p_old * torch.stack(losses)).sum()


def test_the_expected_gradient_of_grpo_is_that_of_minus_the_expected_reward(policy):
    logits, rewards = policy.random_logits(0), normal(1, len(policy.responses))
    (found,) = grad(expected_grpo(policy, logits, logits, rewards, beta=0.0), logits)
    (expected,) = grad(-(policy.probabilities(policy.logprobs(logits)) * rewards).sum(), logits)
    close(found, expected)


def test_ed_grpo_takes_grpos_first_step_and_then_moves_further_from_the_sampler(policy):
    rewards, old_logits = normal(1, len(policy.responses)), policy.random_logits(0)

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
