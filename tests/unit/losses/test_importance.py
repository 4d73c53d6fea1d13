import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import (
    icepop_weights,
    sampler_gap,
    sampler_mismatch,
    sequence_masked_weights,
    truncated_importance_weights,
)

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@few
@given(seed=seeds, cap=st.floats(0.5, 2.0))
def test_weights_are_the_smaller_of_the_cap_and_the_tokens_or_the_responses_ratio(random_batch, seed, cap):
    batch = random_batch(seed)
    log_ratio = (batch.logprobs - batch.old).detach() * batch.mask
    for level, values in (("token", log_ratio), ("sequence", log_ratio.sum(1, keepdim=True).expand_as(log_ratio))):
        weights = truncated_importance_weights(batch.logprobs, batch.old, batch.mask, cap=cap, level=level)
        torch.testing.assert_close(weights, values.exp().clamp(max=cap) * batch.mask, rtol=1e-14, atol=0)
        assert (weights[(values.exp() > cap) & (batch.mask == 1)] == cap).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [2.0, torch.finfo(torch.float32).max])
def test_ratios_beyond_the_largest_number_are_truncated_without_overflow(level, cap):
    logprobs, behavior = torch.zeros(1, 2), torch.full((1, 2), -500.0)
    weights = truncated_importance_weights(logprobs, behavior, torch.ones(1, 2), cap=cap, level=level)
    assert torch.equal(weights, torch.full((1, 2), cap))
    other_way = truncated_importance_weights(behavior, logprobs, torch.ones(1, 2), cap=cap, level=level)
    assert torch.equal(other_way, torch.zeros(1, 2))


@few
@given(seed=seeds, low=st.floats(0, 0.95), high=st.floats(1.0, 1.5))
def test_icepop_weights_are_the_ratio_within_the_bounds_and_zero_outside(random_batch, seed, low, high):
    batch = random_batch(seed)
    both = (batch.logprobs, batch.old, batch.mask)
    log_ratio, valid = (batch.logprobs - batch.old).detach() * batch.mask, batch.mask == 1
    of_sequences = log_ratio.sum(1, keepdim=True).exp().expand_as(log_ratio)
    for level, ratio in (("token", log_ratio.exp()), ("sequence", of_sequences)):
        weights = icepop_weights(*both, low=low, high=high, level=level)
        kept = (ratio >= low) & (ratio <= high) & valid
        assert torch.equal(weights, torch.where(kept, ratio, 0.0))
    mean = of_sequences ** (1 / batch.lengths.clamp(min=1)[:, None])
    weights = sequence_masked_weights(*both, low=low, high=high)
    torch.testing.assert_close(weights, torch.where((mean >= low) & (mean <= high) & valid, log_ratio.exp(), 0.0))


@few
@given(seed=seeds)
def test_sampler_gaps_and_mismatches_are_means_and_percentiles_of_their_formulas(random_batch, seed):
    batch = random_batch(seed)
    found = sampler_gap(batch.logprobs, batch.old, batch.mask)
    log_ratio = (batch.logprobs - batch.old).detach()[batch.mask == 1].numpy()
    ratio = np.exp(log_ratio)
    of_rows = ((batch.logprobs - batch.old).detach() * batch.mask).sum(1)[batch.lengths > 0].exp().numpy()
    means = {
        "sampler_gap": abs(log_ratio).mean(),
        "sampler_ratio": ratio.mean(),
        "sampler_kl_k1": -log_ratio.mean(),
        "sampler_kl_k3": (ratio - 1 - log_ratio).mean(),
    }
    assert {int(term.count) for term in found.values()} == {len(ratio)}
    assert {name: term.mean().item() for name, term in found.items()} == pytest.approx(means, rel=1e-10, abs=1e-14)
    assert sampler_mismatch(batch.logprobs, batch.old, batch.mask) == pytest.approx({
        **means,
        "sampler_gap_max": abs(log_ratio).max(),
        **{f"sampler_ratio_p{q}": np.percentile(ratio, q) for q in (1, 50, 99)},
        "sampler_ratio_max": ratio.max(),
        "sampler_chi2": (ratio**2).mean() - 1,
        "sampler_ess": ratio.mean() ** 2 / (ratio**2).mean(),
        "sampler_chi2_sequence": (of_rows**2).mean() - 1,
        "sampler_ess_sequence": of_rows.mean() ** 2 / (of_rows**2).mean(),
    }, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(("call", "name", "values"), [
    *((truncated_importance_weights, "cap", {"cap": cap}) for cap in (0.0, torch.nan, 1e39)),
    (truncated_importance_weights, "level", {"cap": 2.0, "level": "group"}),
    (icepop_weights, "level", {"low": 0.5, "high": 2.0, "level": "group"}),
    (sequence_masked_weights, "low and high", {"low": 2.0, "high": 0.5}),
    *((icepop_weights, "low and high", {"low": low, "high": high})
      for low, high in ((-0.1, 2.0), (2.0, 2.0), (0.5, torch.inf), (torch.nan, 2.0))),
])
def test_caps_levels_and_bounds_that_do_not_fit_are_errors(call, name, values):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=f"^{name} (is|are) "):
        call(x, x, torch.ones(1, 1), **values)
