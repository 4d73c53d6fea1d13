from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from nemo_edo.losses import exploration_term, floor_share
from nemo_edo.losses.term import REDUCTIONS

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


class EnumerablePolicy:
    """All responses over tokens {0, 1, end} of at most three tokens, with a logit row for each prefix."""

    LENGTH, VOCABULARY, END = 3, 3, 2

    def __init__(self) -> None:
        self.responses = [
            y
            for length in range(1, self.LENGTH + 1)
            for y in product(range(self.VOCABULARY), repeat=length)
            if self.END not in y[:-1] and (y[-1] == self.END or length == self.LENGTH)
        ]
        prefixes = {y[:t] for y in self.responses for t in range(len(y))}
        self.row = {prefix: row for row, prefix in enumerate(sorted(prefixes))}
        self.lengths = torch.tensor([len(y) for y in self.responses], dtype=torch.float64)
        self.mask = (torch.arange(self.LENGTH) < self.lengths[:, None]).double()

    def random_logits(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(self.row), self.VOCABULARY, generator=generator, dtype=torch.float64)
        return logits.requires_grad_()

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """[responses, LENGTH], with NaN in the padding."""
        table = logits.log_softmax(-1)
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        rows = [
            [table[self.row[y[:t]], y[t]] if t < len(y) else nan for t in range(self.LENGTH)] for y in self.responses
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def probabilities(self, logprobs: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask == 1, logprobs, 0.0).sum(1).exp()


@pytest.fixture(scope="module")
def policy():
    return EnumerablePolicy()


def expected_term(policy, logprobs, old_logprobs, reduction, log_ratio_floor=None):
    """The term's exact expectation over pi_old: every response once, weighted by its probability."""
    weights = policy.probabilities(old_logprobs).detach()
    return exploration_term(
        logprobs, old_logprobs, policy.mask,
        reduction=reduction, weights=weights, log_ratio_floor=log_ratio_floor, norm_length=7,
    ).sum


@pytest.mark.parametrize("reduction", ["seq-sum", "seq-mean-token-sum-norm"])
@few
@given(seed=seeds)
def test_the_expected_gradient_of_sums_is_zero_while_the_policy_is_its_sampler(policy, reduction, seed):
    logits = policy.random_logits(seed)
    logprobs = policy.logprobs(logits)
    (gradient,) = grad(expected_term(policy, logprobs, logprobs.detach(), reduction), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


@few
@given(seed=seeds)
def test_the_expected_gradient_of_sequence_means_is_that_of_the_mean_inverse_length(policy, seed):
    logits = policy.random_logits(seed)
    logprobs = policy.logprobs(logits)
    (gradient,) = grad(
        expected_term(policy, logprobs, logprobs.detach(), "seq-mean-token-mean"), logits, retain_graph=True
    )
    (expected,) = grad((policy.probabilities(logprobs) / policy.lengths).sum(), logits)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@few
@given(seed=seeds, old_seed=seeds)
def test_the_expected_value_of_sums_is_minus_the_kl_from_sampler_to_policy(policy, seed, old_seed):
    logprobs, old = policy.logprobs(policy.random_logits(seed)), policy.logprobs(policy.random_logits(old_seed))
    value = expected_term(policy, logprobs, old.detach(), "seq-sum")
    p_old, p = policy.probabilities(old), policy.probabilities(logprobs)
    torch.testing.assert_close(value, -(p_old * (p_old.log() - p.log())).sum(), rtol=0, atol=1e-12)
    assert value <= 1e-15


def test_the_logit_gradient_of_the_expected_log_probability_is_sampler_minus_policy():
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    log_p = logits.log_softmax(0)
    term = exploration_term(log_p[:, None], q.log()[:, None], torch.ones(3, 1), reduction="seq-sum", weights=q)
    (gradient,) = grad(term.sum, logits)
    torch.testing.assert_close(gradient, q - log_p.exp())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@few
@given(seed=seeds)
def test_which_frozen_policy_stands_in_the_log_ratio_does_not_change_the_gradient(random_batch, reduction, seed):
    batch = random_batch(seed)
    gradients = [
        grad(exploration_term(batch.logprobs, frozen, batch.mask, reduction=reduction, norm_length=7).mean(),
             batch.logprobs)[0]
        for frozen in (batch.old, batch.ref)
    ]
    assert torch.equal(*gradients)


@few
@given(seed=seeds, floor=st.floats(-0.6, -0.01))
def test_below_the_floor_the_value_is_the_floor_and_the_gradient_exactly_zero(random_batch, seed, floor):
    batch = random_batch(seed)
    term = exploration_term(batch.logprobs, batch.old, batch.mask, reduction="token-mean", log_ratio_floor=floor)
    (gradient,) = grad(term.sum, batch.logprobs)
    log_ratio = (batch.logprobs - batch.old).detach()
    held = (log_ratio < floor) & (batch.mask == 1)
    assert torch.equal(gradient, torch.where(held, 0.0, batch.mask))
    torch.testing.assert_close(term.sum.detach(), (torch.where(held, floor, log_ratio) * batch.mask).sum())
    assert term.mean() >= floor
    share = floor_share(batch.logprobs, batch.old, batch.mask, floor)
    assert (int(share.sum), int(share.count)) == (int(held.sum()), int(batch.mask.sum()))
    assert not share.sum.requires_grad


def test_without_a_floor_the_floor_share_is_zero_of_all_valid_tokens(random_batch):
    batch = random_batch(0)
    share = floor_share(batch.logprobs, batch.old, batch.mask, None)
    assert (share.sum.item(), int(share.count)) == (0.0, int(batch.mask.sum()))


@few
@given(seed=seeds)
def test_token_weights_multiply_the_gradient_and_leave_the_count(random_batch, seed):
    batch = random_batch(seed)
    weights = batch.ref.exp().requires_grad_()
    plain = exploration_term(batch.logprobs, batch.old, batch.mask, reduction="seq-mean-token-mean")
    weighted = exploration_term(
        batch.logprobs, batch.old, batch.mask, reduction="seq-mean-token-mean", weights=weights
    )
    (plain_gradient,), (gradient,) = grad(plain.sum, batch.logprobs), grad(weighted.sum, batch.logprobs)
    torch.testing.assert_close(gradient, weights.detach() * plain_gradient)
    assert weighted.count == plain.count


@few
@given(seed=seeds, garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_padding_content_changes_neither_value_nor_gradient(random_batch, seed, garbage):
    batch = random_batch(seed)
    results = []
    for filler in (0.0, garbage):
        leaf = torch.where(batch.mask == 1, batch.logprobs.detach(), filler).requires_grad_()
        old = torch.where(batch.mask == 1, batch.old, filler)
        weights = torch.where(batch.lengths > 0, batch.advantages.abs(), filler)
        mean = exploration_term(
            leaf, old, batch.mask, reduction="seq-mean-token-mean", weights=weights, log_ratio_floor=-0.2
        ).mean()
        results.append((mean, *grad(mean, leaf)))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


def test_no_gradient_flows_into_the_sampler_or_the_weights(random_batch):
    batch = random_batch(0)
    old, weights = batch.old.clone().requires_grad_(), batch.advantages.abs().requires_grad_()
    exploration_term(batch.logprobs, old, batch.mask, reduction="seq-sum", weights=weights).sum.backward()
    assert old.grad is None and weights.grad is None and batch.logprobs.grad is not None


@pytest.mark.parametrize("floor", [0.0, 0.1, torch.nan])
def test_a_floor_that_is_not_below_zero_is_an_error(random_batch, floor):
    batch = random_batch(0)
    with pytest.raises(ValueError, match="log_ratio_floor is"):
        exploration_term(batch.logprobs, batch.old, batch.mask, reduction="seq-sum", log_ratio_floor=floor)
    with pytest.raises(ValueError, match="log_ratio_floor is"):
        floor_share(batch.logprobs, batch.old, batch.mask, floor)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "weights"])
@pytest.mark.parametrize("broken", ["shape", "value"])
def test_an_argument_that_does_not_fit_is_named(random_batch, name, broken):
    batch = random_batch(0)
    arguments = {"logprobs": batch.logprobs.detach(), "old_logprobs": batch.old, "weights": batch.ref.exp()}
    if broken == "shape":
        arguments[name] = arguments[name][:, 1:]
    else:
        arguments[name] = arguments[name].clone().index_fill_(1, torch.tensor(0), torch.nan)
    with pytest.raises(ValueError, match=f"^{name} has "):
        exploration_term(**arguments, mask=batch.mask, reduction="seq-sum")
