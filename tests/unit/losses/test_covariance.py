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


@few
@given(seed=seeds)
def test_the_mean_covariance_is_the_covariance_of_the_batch(random_batch, seed):
    batch = random_batch(seed)
    valid = batch.mask == 1
    advantages = batch.ref  # [B, T]
    found = token_covariances(batch.old, advantages, batch.mask)[valid].mean()
    expected = torch.cov(torch.stack([batch.old[valid], advantages[valid]]), correction=0)[0, 1]
    torch.testing.assert_close(found, expected)


@few
@given(seed=seeds, garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_padding_content_changes_no_covariance_and_no_selection(random_batch, seed, garbage):
    batch = random_batch(seed)
    results = []
    for filler in (0.0, garbage):
        logprobs = torch.where(batch.mask == 1, batch.old, filler)
        advantages = torch.where(batch.lengths > 0, batch.advantages, filler)
        covariances = token_covariances(logprobs, advantages, batch.mask)
        dirty = torch.where(batch.mask == 1, covariances, filler)
        results.append(
            (
                covariances,
                clip_cov_selection(dirty, batch.mask, share=0.3, seed=1, **BOUNDS),
                kl_cov_selection(dirty, batch.mask, share=0.3),
            )
        )
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


def test_covariances_have_the_type_of_the_log_probabilities_and_no_gradient(random_batch):
    batch = random_batch(0)
    logprobs = batch.old.float().requires_grad_()
    found = token_covariances(logprobs, batch.advantages.requires_grad_(), batch.mask)
    assert found.dtype == torch.float32 and not found.requires_grad


def test_means_are_taken_in_double_precision():
    advantages = torch.full((1, 4), 1e8) + torch.tensor([[0.0, 8.0, 16.0, 24.0]])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    found = token_covariances(logprobs, advantages, torch.ones(1, 4))
    assert found.tolist() == [[1.5 * -12.0, 0.5 * -4.0, -0.5 * 4.0, -1.5 * 12.0]]


@few
@given(seed=seeds, share=st.floats(0, 1))
def test_clip_cov_draws_the_share_of_all_tokens_from_those_within_the_bounds(random_batch, seed, share):
    batch = random_batch(seed)
    covariances = token_covariances(batch.old, batch.advantages, batch.mask)
    selected = clip_cov_selection(covariances, batch.mask, share=share, seed=seed, **BOUNDS)
    eligible = (batch.mask == 1) & (covariances >= -0.5) & (covariances <= 1.0)
    number = max(int(share * int(batch.mask.sum())), 1 if share > 0 else 0)
    assert selected.dtype == torch.bool and selected.shape == batch.mask.shape
    assert not (selected & ~eligible).any()
    assert int(selected.sum()) == min(number, int(eligible.sum()))


def test_the_bounds_of_clip_cov_belong_to_its_range_and_are_absolute():
    covariances = row(0.99, 1.0, 3.0, 5.0, 5.01)
    selected = clip_cov_selection(covariances, torch.ones(1, 5), share=1.0, low=1.0, high=5.0, seed=0)
    assert selected.tolist() == [[False, True, True, True, False]]


def test_clip_cov_selects_one_token_of_a_small_batch_and_none_for_a_share_of_zero():
    covariances, mask = row(2.0, 2.0, 2.0, 2.0), torch.ones(1, 4)
    bounds = {"low": 1.0, "high": 5.0, "seed": 0}
    assert int(clip_cov_selection(covariances, mask, share=2e-4, **bounds).sum()) == 1
    assert int(clip_cov_selection(covariances, mask, share=0.0, **bounds).sum()) == 0
    assert int(clip_cov_selection(covariances / 4, mask, share=1.0, **bounds).sum()) == 0


def test_the_seed_fixes_the_draw_of_clip_cov_and_every_eligible_token_is_drawn_equally_often():
    covariances, mask = row(2.0, 0.0, 2.0, 2.0, 2.0), torch.ones(1, 5)

    def draw(seed: int) -> torch.Tensor:
        return clip_cov_selection(covariances, mask, share=0.4, low=1.0, high=5.0, seed=seed)

    assert all(torch.equal(draw(seed), draw(seed)) for seed in range(10))
    shares = torch.stack([draw(seed) for seed in range(800)]).double().mean(0)
    torch.testing.assert_close(shares, row(0.5, 0.0, 0.5, 0.5, 0.5), rtol=0, atol=0.07)  # 4 standard errors


def test_a_draw_leaves_the_global_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    clip_cov_selection(row(2.0, 2.0), torch.ones(1, 2), share=0.5, low=1.0, high=5.0, seed=0)
    assert torch.equal(torch.rand(2), expected)


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


def test_kl_cov_breaks_ties_by_position():
    covariances = torch.tensor([[1.0, 3.0, 1.0], [9.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    assert kl_cov_selection(covariances, mask, share=0.6).tolist() == [[True, True, True], [False, False, False]]
    assert kl_cov_selection(covariances, mask, share=0.4).tolist() == [[True, True, False], [False, False, False]]


def test_an_empty_mask_is_an_error():
    zeros = torch.zeros(2, 3)
    for call in (
        lambda: token_covariances(zeros, zeros[:, 0], zeros),
        lambda: clip_cov_selection(zeros, zeros, share=1.0, seed=0, **BOUNDS),
        lambda: kl_cov_selection(zeros, zeros, share=1.0),
    ):
        with pytest.raises(ValueError, match="mask is empty"):
            call()


@pytest.mark.parametrize(
    ("logprobs", "advantages", "message"),
    [
        (row(torch.nan, -1.0), torch.ones(1), "logprobs has NaN"),
        (row(-1.0, -1.0), torch.tensor([torch.inf]), "advantages has NaN or infinite"),
        (row(-1.0), torch.ones(1), r"logprobs has shape \(1, 1\), but mask has \(1, 2\)"),
        (row(-1.0, -1.0), torch.ones(2), r"advantages has shape \(2,\), but mask has \(1, 2\)"),
    ],
)
def test_covariance_arguments_that_do_not_fit_are_named(logprobs, advantages, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        token_covariances(logprobs, advantages, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("covariances", "changes", "message"),
    [
        (row(torch.nan, 1.0), {}, "covariances has NaN"),
        (row(1.0), {}, r"covariances has shape \(1, 1\)"),
        (row(1.0, 1.0), {"share": -0.1}, "share is -0.1"),
        (row(1.0, 1.0), {"share": 1.1}, "share is 1.1"),
        (row(1.0, 1.0), {"share": torch.nan}, "share is nan"),
    ],
)
def test_selection_arguments_that_do_not_fit_are_named(covariances, changes, message):
    share = {"share": 0.5, **changes}
    with pytest.raises(ValueError, match=f"^{message}"):
        clip_cov_selection(covariances, torch.ones(1, 2), seed=0, **BOUNDS, **share)
    with pytest.raises(ValueError, match=f"^{message}"):
        kl_cov_selection(covariances, torch.ones(1, 2), **share)


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (torch.nan, 1.0), (0.0, torch.nan)])
def test_bounds_out_of_order_are_an_error(low, high):
    with pytest.raises(ValueError, match="^low is"):
        clip_cov_selection(row(1.0), torch.ones(1, 1), share=0.5, low=low, high=high, seed=0)
