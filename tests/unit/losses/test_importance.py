import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo import losses

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [2.0, torch.finfo(torch.float32).max])
def test_ratios_beyond_the_largest_number_are_truncated_without_overflow(level, cap):
    logprobs, behavior = torch.zeros(1, 2), torch.full((1, 2), -500.0)
    weights = losses.truncated_importance_weights(logprobs, behavior, torch.ones(1, 2), cap=cap, level=level)
    assert torch.equal(weights, torch.full((1, 2), cap))
    other_way = losses.truncated_importance_weights(behavior, logprobs, torch.ones(1, 2), cap=cap, level=level)
    assert torch.equal(other_way, torch.zeros(1, 2))


@few
@given(seed=seeds, low=st.floats(0, 0.95), high=st.floats(1.0, 1.5), cap=st.floats(0.5, 2.0))
def test_weights_are_the_ratio_below_the_cap_or_within_the_bounds_and_zero_outside(random_batch, seed, low, high, cap):
    batch = random_batch(seed)
    both = (batch.logprobs, batch.old, batch.mask)
    log_ratio, valid = (batch.logprobs - batch.old).detach() * batch.mask, batch.mask == 1
    of_sequences = log_ratio.sum(1, keepdim=True).exp().expand_as(log_ratio)
    for level, ratio in (("token", log_ratio.exp()), ("sequence", of_sequences)):
        weights = losses.truncated_importance_weights(*both, cap=cap, level=level)
        torch.testing.assert_close(weights, ratio.clamp(max=cap) * batch.mask, rtol=1e-14, atol=0)
        assert (weights[(ratio > cap) & valid] == cap).all()
        weights = losses.icepop_weights(*both, low=low, high=high, level=level)
        assert torch.equal(weights, torch.where((ratio >= low) & (ratio <= high) & valid, ratio, 0.0))
    mean = of_sequences ** (1 / batch.lengths.clamp(min=1)[:, None])
    weights = losses.sequence_masked_weights(*both, low=low, high=high)
    torch.testing.assert_close(weights, torch.where((mean >= low) & (mean <= high) & valid, log_ratio.exp(), 0.0))


@few
@given(seed=seeds)
def test_sampler_gaps_and_mismatches_are_means_and_percentiles_of_their_formulas(random_batch, seed):
    batch = random_batch(seed)
    found = losses.sampler_gap(batch.logprobs, batch.old, batch.mask)
    log_ratio = (batch.logprobs - batch.old).detach()[batch.mask == 1].numpy()
    ratio = np.exp(log_ratio)
    of_rows = ((batch.logprobs - batch.old).detach() * batch.mask).sum(1)[batch.lengths > 0].exp().numpy()
    means = {"sampler_gap": abs(log_ratio).mean(), "sampler_ratio": ratio.mean(), "sampler_kl_k1": -log_ratio.mean(),
             "sampler_kl_k3": (ratio - 1 - log_ratio).mean()}
    assert {int(term.count) for term in found.values()} == {len(ratio)}
    assert {name: term.mean().item() for name, term in found.items()} == pytest.approx(means, rel=1e-10, abs=1e-14)
    assert losses.sampler_mismatch(batch.logprobs, batch.old, batch.mask) == pytest.approx({
        **means, "sampler_gap_max": abs(log_ratio).max(), "sampler_ratio_max": ratio.max(),
        **{f"sampler_ratio_p{q}": np.percentile(ratio, q) for q in (1, 50, 99)},
        "sampler_chi2": (ratio**2).mean() - 1, "sampler_ess": ratio.mean() ** 2 / (ratio**2).mean(),
        "sampler_chi2_sequence": (of_rows**2).mean() - 1,
        "sampler_ess_sequence": of_rows.mean() ** 2 / (of_rows**2).mean(),
    }, rel=1e-10, abs=1e-14)


@few
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(-8, 1))
def test_k3_is_never_negative_in_single_precision(seed, size):
    d = 10**size * torch.randn(10_000, generator=torch.Generator().manual_seed(seed))
    assert (losses.kl_per_token(d, torch.zeros_like(d), "k3") >= 0).all()


@few
@given(seed=st.integers(0, 2**32 - 1))
def test_estimators_are_their_formulas_and_in_expectation_the_kl_and_gradient_that_the_docstring_names(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = 3 * torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), ref_logits.log_softmax(0)
    d = log_p - log_q
    formulas = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}
    kl = (log_p.exp() * d).sum()
    (reverse,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (forward,) = torch.autograd.grad((log_q.exp() * -d).sum(), logits, retain_graph=True)
    gradients = {"k1": torch.zeros_like(logits), "k2": reverse, "k3": forward, "k1+": reverse, "k3+": reverse}
    for estimator, gradient in gradients.items():
        values = losses.kl_per_token(log_p, log_q, estimator)
        torch.testing.assert_close(values, formulas[estimator[:2]], rtol=1e-12, atol=1e-14)
        assert torch.equal(values, losses.kl_per_token(log_p, log_q, estimator[:2]))
        expected = (log_p.detach().exp() * values).sum()
        torch.testing.assert_close(torch.autograd.grad(expected, logits, retain_graph=True)[0], gradient)
        if estimator != "k2":  # which is biased
            torch.testing.assert_close(expected, kl)


@few
@given(seed=seeds)
def test_token_spread_is_that_of_the_valid_tokens_in_any_order_to_the_last_bit(random_batch, seed):
    batch = random_batch(seed)
    valid, entropies = batch.mask == 1, batch.logprobs.detach().square()
    given_ = [batch.logprobs.detach(), entropies, batch.old]
    found = losses.token_spread(*given_, batch.mask)
    ratios = np.exp(given_[0][valid].double().numpy() - given_[2][valid].double().numpy())
    expected = {"entropy_p10": np.percentile(given_[1][valid].double(), 10),
                "entropy_p90": np.percentile(given_[1][valid].double(), 90), "ratio_mean": ratios.mean(),
                "ratio_std": ratios.std(), "ratio_min": ratios.min(), "ratio_max": ratios.max(),
                "ratio_p99": np.percentile(ratios, 99)}
    assert found == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(seed))
    assert losses.token_spread(*(tensor[order] for tensor in given_), batch.mask[order]) == found
