import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from nemo_edo.config import AGGREGATIONS
from nemo_edo.losses import GRPOLossConfig, LossTerm, exploration_term, grpo_loss, kl_per_token, reduce_tokens

few = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def config(**changes) -> GRPOLossConfig:
    return GRPOLossConfig(**{"norm_length": 7, "alpha": 0.0, **changes})


def loss_of(batch, settings_, **changes):
    values = {**vars(batch), **changes}
    term, _ = grpo_loss(
        values["logprobs"], values["old"], values["ref"], values["advantages"], values["mask"], settings_
    )
    return term


def gradient_of(batch, settings_, **changes):
    return grad(loss_of(batch, settings_, **changes).mean(), changes.get("logprobs", batch.logprobs))[0]


def plain_grpo(batch, settings_):
    """GRPO written out without any exploration (Shao et al. 2024, eq. 3, negated)."""
    ratio = torch.exp(batch.logprobs - batch.old)
    a = batch.advantages[:, None]
    surrogate = torch.minimum(ratio * a, torch.clamp(ratio, 1 - settings_.clip_low, 1 + settings_.clip_high) * a)
    kl = kl_per_token(batch.logprobs, batch.ref, settings_.kl_estimator)
    arguments = (batch.mask, settings_.aggregation, settings_.norm_length)
    return reduce_tokens(-surrogate, *arguments).plus(reduce_tokens(kl, *arguments), settings_.beta)


@every_aggregation
@few
@given(seed=seeds)
def test_alpha_zero_is_grpo_to_the_last_bit(random_batch, aggregation, seed):
    batch = random_batch(seed)
    settings_ = config(aggregation=aggregation, log_ratio_floor=-0.1)
    expected = plain_grpo(batch, settings_)
    found = loss_of(batch, settings_)
    assert torch.equal(found.mean(), expected.mean())
    assert torch.equal(grad(found.mean(), batch.logprobs)[0], grad(expected.mean(), batch.logprobs)[0])


@every_aggregation
@few
@given(seed=seeds, alpha=st.floats(1e-3, 10))
def test_exploration_adds_its_weight_times_the_aggregated_log_probability_gradient(
    random_batch, aggregation, seed, alpha
):
    batch = random_batch(seed)
    added = gradient_of(batch, config(alpha=alpha, aggregation=aggregation))
    added -= gradient_of(batch, config(alpha=0.0, aggregation=aggregation))
    per_token = {
        "seq-mean-token-mean": batch.mask / batch.lengths.clamp(min=1)[:, None] / (batch.lengths > 0).sum(),
        "token-mean": batch.mask / batch.lengths.sum(),
        "seq-mean-token-sum-norm": batch.mask / 7 / (batch.lengths > 0).sum(),
    }[aggregation]
    torch.testing.assert_close(added, alpha * 0.04 * per_token, rtol=0, atol=1e-12)


def test_the_gradient_agrees_with_finite_differences(random_batch):
    batch = random_batch(3, sequences=4, tokens=3)
    settings_ = config(alpha=2.0, log_ratio_floor=-0.15, dual_clip=1.5)
    assert torch.autograd.gradcheck(lambda x: loss_of(batch, settings_, logprobs=x).mean(), batch.logprobs)


@every_aggregation
@few
@given(seed=seeds, weight=st.floats(1e-3, 2))
def test_at_the_sampler_exploration_is_a_constant_shift_of_every_advantage(random_batch, aggregation, seed, weight):
    batch = random_batch(seed)
    logprobs = batch.old.clone().requires_grad_()
    explored = gradient_of(
        batch, config(aggregation=aggregation, alpha=None, exploration_coefficient=weight), logprobs=logprobs
    )
    shifted = gradient_of(
        batch, config(aggregation=aggregation), logprobs=logprobs, advantages=batch.advantages - weight
    )
    torch.testing.assert_close(explored, shifted, rtol=0, atol=1e-12)


@every_aggregation
@few
@given(seed=seeds, cuts=st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_micro_batches_gives_the_same_gradient(random_batch, aggregation, seed, cuts):
    batch = random_batch(seed, sequences=6)
    settings_ = config(aggregation=aggregation, alpha=5.0, log_ratio_floor=-0.2)
    whole = gradient_of(batch, settings_)
    parts, edges = [], [0, *sorted(cuts), 6]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        parts.append(loss_of(batch, settings_, **{name: value[start:end] for name, value in vars(batch).items()}))
    total = sum(parts[1:], start=parts[0])
    torch.testing.assert_close(grad(total.mean(), batch.logprobs)[0], whole, rtol=0, atol=1e-10)


@few
@given(seed=seeds, alpha=st.floats(1e-3, 10))
def test_with_k1_exploration_is_grpo_with_a_larger_beta(random_batch, seed, alpha):
    batch = random_batch(seed)
    with pytest.warns(UserWarning, match="GRPO with beta"):
        explored = gradient_of(batch, config(kl_estimator="k1", alpha=alpha))
    larger_beta = gradient_of(batch, config(kl_estimator="k1", beta=0.04 * (1 + alpha)))
    torch.testing.assert_close(explored, larger_beta, rtol=0, atol=1e-12)


def test_only_k1_with_exploration_warns(random_batch):
    batch = random_batch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(batch, config(kl_estimator="k1", alpha=0.0))
        loss_of(batch, config(kl_estimator="k3", alpha=1.0))


def one_token(log_ratio: float, advantage: float, **changes):
    logprobs = torch.tensor([[log_ratio - 1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    term, metrics = grpo_loss(logprobs, old, None, advantages, torch.ones(1, 1), config(beta=0.0, **changes))
    return -term.sum.item(), -grad(term.sum, logprobs)[0].item(), metrics["clip_fraction"].mean().item()


@few
@given(advantage=st.floats(-5, 5))
def test_at_ratio_one_value_and_gradient_are_the_advantage(advantage):
    assert one_token(0.0, advantage) == pytest.approx((advantage, advantage, 0.0))


@few
@given(excess=st.floats(1e-3, 5), advantage=st.floats(1e-2, 5))
def test_beyond_the_clip_the_value_is_held_and_the_gradient_zero(excess, advantage):
    above, below = torch.tensor(1.28).log().item() + excess, torch.tensor(0.8).log().item() - excess
    limits = {"clip_low": 0.2, "clip_high": 0.28}
    assert one_token(above, advantage, **limits) == pytest.approx((1.28 * advantage, 0.0, 1.0))
    assert one_token(below, -advantage, **limits) == pytest.approx((-0.8 * advantage, 0.0, 1.0))


@few
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(1e-2, 5))
def test_the_clip_never_holds_back_a_correction(log_ratio, advantage):
    ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
    towards = advantage if log_ratio < 0 else -advantage
    assert one_token(log_ratio, towards) == pytest.approx((ratio * towards, ratio * towards, 0.0))


@few
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(1e-2, 5))
def test_dual_clip_bounds_negative_advantages_alone(log_ratio, advantage):
    value, gradient, _ = one_token(log_ratio, -advantage, dual_clip=3.0)
    plain_value, plain_gradient, _ = one_token(log_ratio, -advantage)
    assert value == pytest.approx(max(plain_value, -3.0 * advantage))
    assert gradient == (0.0 if plain_value < -3.0 * advantage else plain_gradient)
    assert one_token(log_ratio, advantage, dual_clip=3.0) == one_token(log_ratio, advantage)


def test_without_a_kl_the_coefficient_alone_keeps_exploration_on(random_batch):
    batch = random_batch(0)
    kept = gradient_of(batch, config(beta=0.0, alpha=None, exploration_coefficient=0.3), ref=None)
    off = gradient_of(batch, config(beta=0.0, alpha=1.0), ref=None)
    assert torch.equal(off, gradient_of(batch, config(beta=0.0)))
    assert (kept - off).abs().max() > 1e-3


def test_a_missing_reference_is_an_error_where_beta_needs_it(random_batch):
    with pytest.raises(ValueError, match="ref_logprobs is None, but beta is 0.04"):
        loss_of(random_batch(0), config(), ref=None)


@every_aggregation
def test_metrics_are_the_unweighted_parts_and_the_shares_of_valid_tokens(random_batch, aggregation):
    batch = random_batch(1)
    settings_ = config(aggregation=aggregation, alpha=3.0, log_ratio_floor=-0.1)
    loss, metrics = grpo_loss(batch.logprobs, batch.old, batch.ref, batch.advantages, batch.mask, settings_)
    assert metrics.keys() == {"policy_loss", "kl", "exploration", "log_ratio", "clip_fraction", "floor_fraction"}
    assert not any(term.sum.requires_grad for term in metrics.values())
    parts = metrics["policy_loss"].plus(metrics["kl"], 0.04).plus(metrics["exploration"], 0.12)
    torch.testing.assert_close(loss.mean(), parts.mean())

    valid = batch.mask == 1
    log_ratio, advantages = (batch.logprobs - batch.old)[valid], batch.advantages[:, None].expand_as(batch.mask)[valid]
    clipped = ((advantages > 0) & (log_ratio.exp() > 1.2)) | ((advantages < 0) & (log_ratio.exp() < 0.8))
    assert metrics["log_ratio"].mean().item() == pytest.approx(log_ratio.mean().item())
    assert metrics["clip_fraction"].mean().item() == pytest.approx(clipped.double().mean().item())
    assert metrics["floor_fraction"].mean().item() == pytest.approx((log_ratio < -0.1).double().mean().item())
    assert clipped.any() and (log_ratio < -0.1).any()
    expected = exploration_term(
        batch.logprobs, batch.old, batch.mask, reduction=aggregation, log_ratio_floor=-0.1, norm_length=7
    )
    assert torch.equal(metrics["exploration"].mean(), expected.mean())


def test_gradients_flow_into_the_policy_alone(random_batch):
    batch = random_batch(0)
    others = {name: getattr(batch, name).clone().requires_grad_() for name in ("old", "ref", "advantages")}
    loss_of(batch, config(alpha=1.0), **others).mean().backward()
    assert batch.logprobs.grad.abs().sum() > 0
    assert all(tensor.grad is None for tensor in others.values())


@few
@given(seed=seeds, garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_padding_content_changes_neither_value_nor_gradient(random_batch, seed, garbage):
    batch = random_batch(seed)
    results = []
    for filler in (0.0, garbage):
        padded = {
            name: torch.where(batch.mask == 1, getattr(batch, name).detach(), filler)
            for name in ("logprobs", "old", "ref")
        }
        padded["logprobs"].requires_grad_()
        padded["advantages"] = torch.where(batch.lengths > 0, batch.advantages, filler)
        settings_ = config(alpha=5.0, dual_clip=2.0)
        results.append((loss_of(batch, settings_, **padded).mean(), gradient_of(batch, settings_, **padded)))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


def test_token_advantages_equal_sequence_advantages_repeated(random_batch):
    batch = random_batch(2)
    repeated = batch.advantages[:, None].repeat(1, batch.mask.shape[1])
    assert torch.equal(gradient_of(batch, config()), gradient_of(batch, config(), advantages=repeated))


@pytest.mark.parametrize("name", ["logprobs", "old", "ref", "advantages"])
@pytest.mark.parametrize("broken", ["shape", "value"])
def test_an_argument_that_does_not_fit_is_named(random_batch, name, broken):
    batch = random_batch(0)
    value = getattr(batch, name).detach()
    value = value[1:] if broken == "shape" else torch.full_like(value, torch.nan)
    argument = {"old": "old_logprobs", "ref": "ref_logprobs"}.get(name, name)
    with pytest.raises(ValueError, match=f"^{argument} has "):
        loss_of(batch, config(), **{name: value})


def test_ratios_that_overflow_are_an_error_rather_than_a_nan_gradient():
    logprobs, old, mask = torch.zeros(1, 1, requires_grad=True), torch.full((1, 1), -100.0), torch.ones(1, 1)
    with pytest.raises(ValueError, match="the ratio exp"):
        grpo_loss(logprobs, old, logprobs, torch.ones(1), mask, config())
    with pytest.raises(ValueError, match="the KL estimate"):
        grpo_loss(old, old, logprobs, torch.ones(1), mask, config())


def test_a_batch_without_valid_tokens_has_loss_zero_and_gradient_zero(random_batch):
    batch = random_batch(0)
    term: LossTerm = loss_of(batch, config(alpha=1.0), mask=torch.zeros_like(batch.mask))
    assert term.mean().item() == 0.0
    assert torch.equal(grad(term.mean(), batch.logprobs)[0], torch.zeros_like(batch.old))
