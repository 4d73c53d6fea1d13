import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import clip_cov_selection, kl_cov_selection, token_covariances

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
BOUNDS = {"low": -0.5, "high": 1.0}


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@few
@given(seed=seeds)
def test_covariances_are_the_products_of_deviations_from_the_means_over_valid_tokens(random_batch, seed):
    batch = random_batch(seed)
    places = [(b, t) for b in range(6) for t in range(int(batch.lengths[b]))]
    mean_logprob = statistics.fmean(batch.old[place].item() for place in places)
    mean_advantage = statistics.fmean(batch.advantages[b].item() for b, _ in places)
    expected = torch.zeros_like(batch.old)
    for b, t in places:
        expected[b, t] = (batch.old[b, t] - mean_logprob) * (batch.advantages[b] - mean_advantage)
    found = token_covariances(batch.old, batch.advantages, batch.mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert torch.equal(found[batch.mask == 0], torch.zeros(int((batch.mask == 0).sum()), dtype=torch.float64))


def test_means_are_taken_in_double_precision():
    advantages = torch.full((1, 4), 1e8) + torch.tensor([[0.0, 8.0, 16.0, 24.0]])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    found = token_covariances(logprobs, advantages, torch.ones(1, 4))
    assert found.tolist() == [[1.5 * -12.0, 0.5 * -4.0, -0.5 * 4.0, -1.5 * 12.0]]


@few
@given(seed=seeds, share=st.floats(0, 1))
def test_clip_cov_samples_the_share_of_all_tokens_from_those_within_the_bounds(random_batch, seed, share):
    batch = random_batch(seed)
    covariances = token_covariances(batch.old, batch.advantages, batch.mask)
    selected = clip_cov_selection(covariances, batch.mask, share=share, seed=seed, **BOUNDS)
    eligible = (batch.mask == 1) & (covariances >= -0.5) & (covariances <= 1.0)
    number = max(int(share * int(batch.mask.sum())), 1 if share > 0 else 0)
    assert selected.dtype == torch.bool and selected.shape == batch.mask.shape
    assert not (selected & ~eligible).any()
    assert int(selected.sum()) == min(number, int(eligible.sum()))


@pytest.mark.parametrize(("values", "share", "selected"), [
    ((0.99, 1.0, 3.0, 5.0, 5.01), 1.0, 3),  # absolute bounds, both of which belong to the range
    ((2.0,) * 4, 2e-4, 1), ((2.0,) * 4, 0.0, 0), ((0.5,) * 4, 1.0, 0),
])
def test_clip_cov_selects_eligible_tokens_alone_one_at_least_and_none_for_a_share_of_zero(values, share, selected):
    found = clip_cov_selection(row(*values), torch.ones(1, len(values)), share=share, low=1.0, high=5.0, seed=0)
    assert int(found.sum()) == selected
    assert all(1 <= value <= 5 for value in row(*values)[found])


def test_the_seed_alone_fixes_clip_covs_selection_and_every_eligible_token_is_as_likely():
    covariances, mask = row(2.0, 0.0, 2.0, 2.0, 2.0), torch.ones(1, 5)

    def selection(seed: int) -> torch.Tensor:
        return clip_cov_selection(covariances, mask, share=0.4, low=1.0, high=5.0, seed=seed)

    state = torch.random.get_rng_state()
    assert all(torch.equal(selection(seed), selection(seed)) for seed in range(10))
    assert torch.equal(torch.random.get_rng_state(), state)  # the global random state is left alone
    shares = torch.stack([selection(seed) for seed in range(800)]).double().mean(0)
    torch.testing.assert_close(shares, row(0.5, 0.0, 0.5, 0.5, 0.5), rtol=0, atol=0.07)  # 4 standard errors


@few
@given(seed=seeds, share=st.floats(0, 1))
def test_kl_cov_selects_the_share_of_tokens_with_the_highest_covariances(random_batch, seed, share):
    batch = random_batch(seed)
    covariances = token_covariances(batch.old, batch.advantages, batch.mask)
    selected = kl_cov_selection(covariances, batch.mask, share=share)
    left = (batch.mask == 1) & ~selected
    assert selected.dtype == torch.bool and not (selected & (batch.mask == 0)).any()
    assert int(selected.sum()) == max(int(share * int(batch.mask.sum())), 1 if share > 0 else 0)
    if selected.any() and left.any():
        assert covariances[selected].min() >= covariances[left].max()
