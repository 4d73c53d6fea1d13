import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from nemo_edo.losses import (
    exploration_term,
    icepop_weights,
    sampler_gap,
    sampler_mismatch,
    truncated_importance_weights,
)

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
MEANS_AND_EXTREMES = ("sampler_gap", "sampler_gap_max", "sampler_ratio", "sampler_ratio_max", "sampler_kl_k1",
                      "sampler_kl_k3")


@few
@given(seed=seeds, cap=st.floats(0.5, 2.0))
def test_token_weights_are_the_smaller_of_ratio_and_cap_and_zero_at_padding(random_batch, seed, cap):
    batch = random_batch(seed)
    weights = truncated_importance_weights(batch.logprobs, batch.old, batch.mask, cap=cap)
    ratio = (batch.logprobs - batch.old).detach().exp()
    torch.testing.assert_close(weights, ratio.clamp(max=cap) * batch.mask, rtol=1e-14, atol=0)
    assert (weights <= cap).all() and (weights[(ratio > cap) & (batch.mask == 1)] == cap).all()
    assert not weights.requires_grad


@few
@given(seed=seeds, cap=st.floats(0.5, 2.0))
def test_sequence_weights_are_the_ratio_of_the_whole_response_at_each_of_its_tokens(random_batch, seed, cap):
    batch = random_batch(seed)
    weights = truncated_importance_weights(batch.logprobs, batch.old, batch.mask, cap=cap, level="sequence")
    for row, length in enumerate(batch.lengths.tolist()):
        policy, behavior = (x[row, :length].detach().sum().exp() for x in (batch.logprobs, batch.old))
        expected = torch.full((length,), min((policy / behavior).item(), cap), dtype=torch.float64)
        torch.testing.assert_close(weights[row, :length], expected)
        assert (weights[row, length:] == 0).all()


def test_a_truncated_weight_is_the_cap_to_the_last_bit_and_none_exceeds_it():
    caps = torch.linspace(0.1, 10, 500)
    for cap in caps.tolist():
        log_ratio = torch.tensor([[cap]]).log() + torch.tensor([[-1e-6, -1e-7, 1e-6, 1.0]])
        weights = truncated_importance_weights(log_ratio, torch.zeros(1, 4), torch.ones(1, 4), cap=cap)
        assert (weights <= cap).all() and (weights[0, 2:] == cap).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [2.0, 3e38])
def test_ratios_beyond_the_largest_number_are_truncated_without_overflow(level, cap):
    logprobs, behavior = torch.zeros(1, 2), torch.full((1, 2), -500.0)
    weights = truncated_importance_weights(logprobs, behavior, torch.ones(1, 2), cap=cap, level=level)
    assert torch.equal(weights, torch.full((1, 2), cap))
    other_way = truncated_importance_weights(behavior, logprobs, torch.ones(1, 2), cap=cap, level=level)
    assert torch.equal(other_way, torch.zeros(1, 2))


@few
@given(seeds_=st.tuples(st.integers(0, 99), st.integers(100, 199), st.integers(200, 299)))
def test_untruncated_sequence_weights_turn_samples_of_another_policy_into_samples_of_the_old_one(
    enumerable_policy, seeds_
):
    policy = enumerable_policy
    logits, old_logits, mu_logits = (policy.random_logits(seed) for seed in seeds_)
    logprobs, old, mu = (policy.logprobs(x) for x in (logits, old_logits, mu_logits))
    weights = truncated_importance_weights(old, mu, policy.mask, cap=1e9, level="sequence")
    samplers = {"old": policy.probabilities(old)[:, None], "mu": policy.probabilities(mu)[:, None] * weights}
    on_old, on_mu = (
        exploration_term(logprobs, old, policy.mask, reduction="seq-sum", weights=w.expand_as(policy.mask)).sum
        for w in samplers.values()
    )
    torch.testing.assert_close(on_mu, on_old)
    torch.testing.assert_close(*(grad(value, logits, retain_graph=True)[0] for value in (on_mu, on_old)))


@few
@given(seed=seeds, low=st.floats(0, 0.95), high=st.floats(1.0, 1.5))
def test_icepop_weights_are_the_ratio_within_the_bounds_and_zero_outside(random_batch, seed, low, high):
    batch = random_batch(seed)
    weights = icepop_weights(batch.logprobs, batch.old, batch.mask, low=low, high=high)
    ratio = (batch.logprobs - batch.old).detach().exp()
    kept = (ratio >= low) & (ratio <= high) & (batch.mask == 1)
    assert torch.equal(weights, torch.where(kept, ratio, 0.0))
    assert not weights.requires_grad


def test_icepops_bounds_belong_to_the_range_and_an_overflow_does_not():
    log_ratio = torch.tensor([[0.5, 2.0, 0.49, 2.01]]).log()
    mask = torch.ones(1, 4)
    low, high = (log_ratio[0, column].exp().item() for column in (0, 1))
    weights = icepop_weights(log_ratio, torch.zeros(1, 4), mask, low=low, high=high)
    assert torch.equal(weights != 0, torch.tensor([[True, True, False, False]]))
    overflow = icepop_weights(torch.zeros(1, 4), torch.full((1, 4), -500.0), mask, low=0.5, high=3e38)
    assert torch.equal(overflow, torch.zeros(1, 4))


@few
@given(seed=seeds)
def test_sampler_gaps_are_means_over_valid_tokens_of_their_formulas(random_batch, seed):
    batch = random_batch(seed)
    found = sampler_gap(batch.logprobs, batch.old, batch.mask)
    log_ratio = (batch.logprobs - batch.old).detach()[batch.mask == 1]
    expected = {
        "sampler_gap": log_ratio.abs(),
        "sampler_ratio": log_ratio.exp(),
        "sampler_kl_k1": -log_ratio,
        "sampler_kl_k3": log_ratio.exp() - 1 - log_ratio,
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert int(found[name].count) == len(values) and not found[name].sum.requires_grad
        torch.testing.assert_close(found[name].mean(), values.mean(), rtol=1e-10, atol=1e-14)


def test_the_samplers_kl_estimates_are_unbiased_for_the_kl_from_sampler_to_trainer():
    counts = torch.tensor([1, 2, 5])  # how often each token occurs among 8 samples: pi_gen exactly
    log_gen = (counts / 8).double().log()
    log_old = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64).log_softmax(0)
    sampler, trainer = (x.repeat_interleave(counts)[None] for x in (log_gen, log_old))
    found = sampler_gap(trainer, sampler, torch.ones(1, 8))
    kl = (log_gen.exp() * (log_gen - log_old)).sum()
    torch.testing.assert_close(found["sampler_kl_k1"].mean(), kl)
    torch.testing.assert_close(found["sampler_kl_k3"].mean(), kl)
    assert found["sampler_ratio"].mean().item() == pytest.approx(1)


@few
@given(seed=seeds)
def test_a_collections_mismatch_has_the_means_of_the_gap_and_numpys_percentiles(random_batch, seed):
    batch = random_batch(seed)
    found = sampler_mismatch(batch.logprobs, batch.old, batch.mask)
    log_ratio = (batch.logprobs - batch.old).detach()[batch.mask == 1].double().numpy()
    ratio = np.exp(log_ratio)
    means = {name: float(term.mean()) for name, term in sampler_gap(batch.logprobs, batch.old, batch.mask).items()}
    assert found == pytest.approx({
        **means,
        "sampler_gap_max": abs(log_ratio).max(),
        "sampler_ratio_p1": np.percentile(ratio, 1),
        "sampler_ratio_p50": np.percentile(ratio, 50),
        "sampler_ratio_p99": np.percentile(ratio, 99),
        "sampler_ratio_max": ratio.max(),
    }, rel=1e-6, abs=1e-9)


def test_a_mismatch_beyond_all_numbers_still_has_a_gap_and_no_order_of_rows_changes_it():
    sampler = torch.tensor([[-9999.0, -1.0], [-2.0, -0.5]])
    trainer, mask = torch.full((2, 2), -1.0), torch.ones(2, 2)
    found = sampler_mismatch(trainer, sampler, mask)
    assert found["sampler_gap"] == pytest.approx((9998 + 0 + 1 + 0.5) / 4)
    assert found["sampler_ratio_max"] == torch.inf
    turned = sampler_mismatch(trainer.flip(0), sampler.flip(0), mask)
    assert {name: turned[name] for name in MEANS_AND_EXTREMES} == {name: found[name] for name in MEANS_AND_EXTREMES}


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_padding_content_reaches_no_weight_and_no_mean(random_batch, garbage):
    batch = random_batch(0)
    dirty = [torch.where(batch.mask == 1, x.detach(), garbage) for x in (batch.logprobs, batch.old)]
    for level in ("token", "sequence"):
        weights = truncated_importance_weights(*dirty, batch.mask, cap=2.0, level=level)
        expected = truncated_importance_weights(batch.logprobs, batch.old, batch.mask, cap=2.0, level=level)
        assert torch.equal(weights, expected)
    weights = icepop_weights(*dirty, batch.mask, low=0.5, high=5.0)
    assert torch.equal(weights, icepop_weights(batch.logprobs, batch.old, batch.mask, low=0.5, high=5.0))
    clean = sampler_gap(batch.logprobs, batch.old, batch.mask)
    assert all(torch.equal(term.sum, clean[name].sum) for name, term in sampler_gap(*dirty, batch.mask).items())


def test_an_all_masked_sequence_has_weights_of_zero():
    nothing, mask = torch.full((2, 3), torch.nan), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    nothing[0, 0] = -1.0
    for level in ("token", "sequence"):
        assert torch.equal(truncated_importance_weights(nothing, nothing, mask, cap=2.0, level=level), mask)
    assert torch.equal(icepop_weights(nothing, nothing, mask, low=0.5, high=5.0), mask)


def test_an_empty_mask_is_an_error():
    zeros = torch.zeros(2, 3)
    for call in (
        lambda: truncated_importance_weights(zeros, zeros, zeros, cap=2.0),
        lambda: icepop_weights(zeros, zeros, zeros, low=0.5, high=5.0),
        lambda: sampler_gap(zeros, zeros, zeros),
        lambda: sampler_mismatch(zeros, zeros, zeros),
    ):
        with pytest.raises(ValueError, match="mask is empty"):
            call()


@pytest.mark.parametrize("cap", [0.0, -1.0, torch.inf, torch.nan, 1e39])
def test_a_cap_that_is_not_finite_and_above_zero_is_an_error(cap):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="^cap is"):
        truncated_importance_weights(x, x, torch.ones(1, 1), cap=cap)


@pytest.mark.parametrize("bounds", [(-0.1, 2.0), (2.0, 2.0), (3.0, 2.0), (0.5, torch.inf), (torch.nan, 2.0)])
def test_icepop_bounds_that_are_no_range_are_an_error(bounds):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="^low and high are"):
        icepop_weights(x, x, torch.ones(1, 1), low=bounds[0], high=bounds[1])


def test_an_unknown_level_and_a_ratio_that_overflows_in_a_mean_are_errors():
    x, mask = torch.zeros(1, 1), torch.ones(1, 1)
    with pytest.raises(ValueError, match="^level is 'group', expected token or sequence"):
        truncated_importance_weights(x, x, mask, cap=2.0, level="group")
    with pytest.raises(ValueError, match=r"^the ratio exp\(logprobs - sampler_logprobs\)"):
        sampler_gap(x, x - 100, mask)


@pytest.mark.parametrize("broken", ["shape", "value"])
@pytest.mark.parametrize("argument", [0, 1])
def test_an_argument_that_does_not_fit_is_named(random_batch, argument, broken):
    batch = random_batch(0)
    tensors = [batch.logprobs.detach(), batch.old]
    tensors[argument] = tensors[argument][1:] if broken == "shape" else torch.full_like(batch.old, torch.nan)
    name = ("logprobs", "behavior_logprobs")[argument]
    with pytest.raises(ValueError, match=f"^{name} has "):
        truncated_importance_weights(*tensors, batch.mask, cap=2.0)
    with pytest.raises(ValueError, match=f"^{name} has "):
        icepop_weights(*tensors, batch.mask, low=0.5, high=2.0)
    with pytest.raises(ValueError, match=f"^{('logprobs', 'sampler_logprobs')[argument]} has "):
        sampler_gap(*tensors, batch.mask)
