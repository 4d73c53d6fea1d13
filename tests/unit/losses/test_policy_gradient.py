import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from nemo_edo.config import AGGREGATIONS
from nemo_edo.config.losses import KL_ESTIMATORS
from nemo_edo.losses import (
    GRPOLossConfig,
    dapo_config,
    dr_grpo_config,
    exploration_term,
    grpo_exploration,
    grpo_loss,
    gspo_config,
    icepop_weights,
    kl_per_token,
    ppo_clip_loss,
    reduce_tokens,
    truncated_importance_weights,
)

few = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)
OPTIONS = ("sampler_logprobs", "exploration_weights", "selected")

any_changes = st.fixed_dictionaries(
    {
        "aggregation": st.sampled_from(AGGREGATIONS),
        "beta": st.sampled_from([0.0, 0.3]),
        "exploration_coefficient": st.floats(0.01, 2),
        "kl_estimator": st.sampled_from([name for name in KL_ESTIMATORS if name != "k1"]),
        "dual_clip": st.sampled_from([None, 1.3]),
        "log_ratio_floor": st.sampled_from([None, -0.1]),
        "importance_sampling_level": st.sampled_from(["token", "sequence"]),
        "sampler_correction": st.sampled_from(["none", "tis", "icepop"]),
        "exploration_control": st.sampled_from(["none", "noise"]),
        "covariance_control": st.sampled_from(["none", "clip-cov", "kl-cov"]),
    }
).map(lambda changes: {**changes, "alpha": None, "tis_cap": 1.1, "icepop_low": 0.6, "icepop_high": 1.5})


def config(**changes) -> GRPOLossConfig:
    return GRPOLossConfig(**{"norm_length": 7, "alpha": 0.0, **changes})


@pytest.fixture(scope="session")
def optioned_batch(random_batch):
    """A batch with every optional argument of the loss that the config takes."""

    def make(seed: int, settings_: GRPOLossConfig):
        batch = random_batch(seed)
        generator = torch.Generator().manual_seed(seed)
        shape = batch.mask.shape
        batch.sampler_logprobs = batch.old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        batch.exploration_weights = torch.rand(shape[0], generator=generator, dtype=torch.float64)
        if settings_.covariance_control != "none":
            batch.selected = torch.rand(shape, generator=generator) < 0.4
        return batch

    return make


def loss_and_metrics(batch, settings_, **changes):
    values = {**vars(batch), **changes}
    arguments = [values[name] for name in ("logprobs", "old", "ref", "advantages", "mask")]
    return grpo_loss(*arguments, settings_, **{name: values[name] for name in OPTIONS if name in values})


def loss_of(batch, settings_, **changes):
    return loss_and_metrics(batch, settings_, **changes)[0]


def gradient_of(batch, settings_, **changes):
    return grad(loss_of(batch, settings_, **changes).mean(), changes.get("logprobs", batch.logprobs))[0]


def dense_grpo(batch, settings_):
    """The mean loss and its gradient from the formulas, token by token, in plain Python."""
    rows = [row for row in range(len(batch.lengths)) if batch.lengths[row] > 0]
    tokens = sum(int(batch.lengths[row]) for row in rows)
    loss, gradient = 0.0, torch.zeros_like(batch.old)
    for row in rows:
        length = int(batch.lengths[row])
        divisor = {
            "seq-mean-token-mean": length * len(rows),
            "token-mean": tokens,
            "seq-mean-token-sum-norm": settings_.norm_length * len(rows),
        }[settings_.aggregation]
        log_ratios = [(batch.logprobs[row, t] - batch.old[row, t]).item() for t in range(length)]
        for t, log_ratio in enumerate(log_ratios):
            mean_log_ratio = sum(log_ratios) / length
            at_level = mean_log_ratio if settings_.importance_sampling_level == "sequence" else log_ratio
            value, slope = dense_token(batch, settings_, row, t, math.exp(at_level), log_ratio)
            loss += value / divisor
            gradient[row, t] = slope / divisor
    return loss, gradient


def dense_token(batch, settings_, row, t, ratio, log_ratio):
    advantage = batch.advantages[row].item()
    clipped = min(max(ratio, 1 - settings_.clip_low), 1 + settings_.clip_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    slope = ratio * advantage if surrogate == ratio * advantage else 0.0
    if settings_.dual_clip is not None and advantage < 0 and surrogate < settings_.dual_clip * advantage:
        surrogate, slope = settings_.dual_clip * advantage, 0.0

    selected = settings_.covariance_control != "none" and batch.selected[row, t].item()
    penalty = 0.0
    if selected and settings_.covariance_control == "clip-cov":
        slope = 0.0
    if selected and settings_.covariance_control == "kl-cov":
        penalty = settings_.kl_cov_coefficient * abs(log_ratio)
        slope -= settings_.kl_cov_coefficient * math.copysign(1.0, log_ratio)

    weight, sampler_ratio = 1.0, math.exp(batch.old[row, t] - batch.sampler_logprobs[row, t])
    if settings_.sampler_correction == "tis":
        weight = min(sampler_ratio, settings_.tis_cap)
    elif settings_.sampler_correction == "icepop":
        weight = sampler_ratio if settings_.icepop_low <= sampler_ratio <= settings_.icepop_high else 0.0

    floor = -math.inf if settings_.log_ratio_floor is None else settings_.log_ratio_floor
    factor = settings_.exploration_weight * batch.exploration_weights[row].item()
    if settings_.exploration_control == "noise":
        factor *= math.exp(log_ratio)

    d = (batch.logprobs[row, t] - batch.ref[row, t]).item()
    kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[settings_.kl_estimator[:2]]
    kl_slope = d if settings_.kl_estimator != "k3" else 1 - math.exp(-d)
    value = weight * (-surrogate + penalty + factor * max(log_ratio, floor)) + settings_.beta * kl
    return value, weight * (-slope + factor * (log_ratio >= floor)) + settings_.beta * kl_slope


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes)
def test_every_combination_of_options_agrees_with_the_formulas_written_out(optioned_batch, seed, changes):
    settings_ = config(**changes)
    batch = optioned_batch(seed, settings_)
    loss, gradient = dense_grpo(batch, settings_)
    assert loss_of(batch, settings_).mean().item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(gradient_of(batch, settings_), gradient, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes, cuts=st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_micro_batches_gives_the_same_gradient(optioned_batch, seed, changes, cuts):
    settings_ = config(**changes)
    batch = optioned_batch(seed, settings_)
    whole, whole_metrics = loss_and_metrics(batch, settings_)
    parts, edges = [], [0, *sorted(cuts), 6]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        if not batch.mask[start:end].any():
            continue  # padding alone is no micro-batch
        rows = {name: value[start:end] for name, value in vars(batch).items()}
        parts.append(loss_and_metrics(batch, settings_, **rows))
    total = sum((term for term, _ in parts[1:]), start=parts[0][0])
    gradients = [grad(term.mean(), batch.logprobs, retain_graph=True)[0] for term in (total, whole)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
    assert total.count == whole.count
    for name, expected in whole_metrics.items():
        found = sum((metrics[name] for _, metrics in parts[1:]), start=parts[0][1][name])
        assert found.mean().item() == pytest.approx(expected.mean().item(), abs=1e-6), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes)
def test_the_exploration_term_by_itself_is_what_the_loss_adds_to_its_base(optioned_batch, seed, changes):
    settings_ = config(**changes)
    batch = optioned_batch(seed, settings_)
    loss, metrics = loss_and_metrics(batch, settings_)
    base = loss_of(batch, config(**{**changes, "exploration_coefficient": None, "alpha": 0.0}))
    term = grpo_exploration(
        batch.logprobs, batch.old, batch.mask, settings_,
        sampler_logprobs=batch.sampler_logprobs, exploration_weights=batch.exploration_weights,
    )
    assert torch.equal(term.sum, metrics["exploration"].sum)
    combined = base.plus(term, settings_.exploration_weight)
    gradients = [grad(x.mean(), batch.logprobs, retain_graph=True)[0] for x in (loss, combined)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


def base_grpo(batch, settings_):
    """The loss without any exploration (Shao et al. 2024, eq. 3, negated), under the same options."""
    old, lengths = batch.old, batch.lengths.clamp(min=1)[:, None]
    log_ratio = (batch.logprobs - old) * batch.mask
    at_level = log_ratio
    if settings_.importance_sampling_level == "sequence":
        at_level = (log_ratio.sum(1, keepdim=True) / lengths).detach() + (log_ratio - log_ratio.detach())
    ratio, a = at_level.exp(), batch.advantages[:, None]
    surrogate = torch.minimum(ratio * a, torch.clamp(ratio, 1 - settings_.clip_low, 1 + settings_.clip_high) * a)
    if settings_.dual_clip is not None:
        surrogate = torch.where(a < 0, torch.maximum(surrogate, settings_.dual_clip * a), surrogate)
    weights = torch.ones_like(old)
    if settings_.sampler_correction == "tis":
        weights = truncated_importance_weights(old, batch.sampler_logprobs, batch.mask, cap=settings_.tis_cap)
    if settings_.sampler_correction == "icepop":
        bounds = {"low": settings_.icepop_low, "high": settings_.icepop_high}
        weights = icepop_weights(old, batch.sampler_logprobs, batch.mask, **bounds)
    if settings_.covariance_control == "clip-cov":
        surrogate = torch.where(batch.selected, surrogate.detach(), surrogate)

    arguments = (batch.mask, settings_.aggregation, settings_.norm_length)
    loss = reduce_tokens(-(weights * surrogate), *arguments)
    if settings_.covariance_control == "kl-cov":
        penalty = reduce_tokens(weights * batch.selected * log_ratio.abs(), *arguments)
        loss = loss.plus(penalty, settings_.kl_cov_coefficient)
    kl = kl_per_token(batch.logprobs, batch.ref, settings_.kl_estimator)
    return loss.plus(reduce_tokens(kl, *arguments), settings_.beta)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes)
def test_alpha_zero_is_the_base_loss_to_the_last_bit_under_every_option(optioned_batch, seed, changes):
    settings_ = config(**{**changes, "exploration_coefficient": None, "alpha": 0.0, "beta": 0.3})
    batch = optioned_batch(seed, settings_)
    found, expected = loss_of(batch, settings_), base_grpo(batch, settings_)
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


@few
@given(seed=seeds, alpha=st.floats(1e-3, 10))
def test_with_k1_exploration_is_grpo_with_a_larger_beta(random_batch, seed, alpha):
    batch = random_batch(seed)
    explored = gradient_of(batch, config(kl_estimator="k1", alpha=alpha))
    larger_beta = gradient_of(batch, config(kl_estimator="k1", beta=0.04 * (1 + alpha)))
    torch.testing.assert_close(explored, larger_beta, rtol=0, atol=1e-12)


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
    value, gradient, held = one_token(log_ratio, -advantage, dual_clip=3.0)
    plain_value, plain_gradient, plain_held = one_token(log_ratio, -advantage)
    bounded = plain_value < -3.0 * advantage
    assert value == pytest.approx(max(plain_value, -3.0 * advantage))
    assert gradient == (0.0 if bounded else plain_gradient)
    assert held == (1.0 if bounded else plain_held)
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
    clips = {"clip_fraction", "clip_low_fraction", "clip_high_fraction", "clip_dual_fraction"}
    assert metrics.keys() == {"policy_loss", "kl", "exploration", "log_ratio", "floor_fraction"} | clips
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes, garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_padding_content_changes_neither_value_nor_gradient(optioned_batch, seed, changes, garbage):
    settings_ = config(**changes)
    batch = optioned_batch(seed, settings_)
    results = []
    for filler in (0.0, garbage):
        padded = {
            name: torch.where(batch.mask == 1, getattr(batch, name).detach(), filler)
            for name in ("logprobs", "old", "ref", "sampler_logprobs", "selected")
            if hasattr(batch, name)
        }
        padded["logprobs"].requires_grad_()
        for name in ("advantages", "exploration_weights"):
            padded[name] = torch.where(batch.lengths > 0, getattr(batch, name), filler)
        loss, metrics = loss_and_metrics(batch, settings_, **padded)
        values = torch.stack([term.mean().double() for term in metrics.values()])
        results.append((loss.mean(), grad(loss.mean(), padded["logprobs"])[0], values))
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


@pytest.mark.parametrize("rows", [0, 6])
def test_an_empty_mask_is_an_error_and_an_all_masked_sequence_is_not(random_batch, rows):
    batch = random_batch(0)
    cut = {name: value[:rows] for name, value in vars(batch).items()}
    with pytest.raises(ValueError, match=rf"mask is empty: none of its \({rows}, 5\) entries is 1"):
        loss_of(batch, config(alpha=1.0), **{**cut, "mask": torch.zeros(rows, 5)})

    mask = batch.mask.clone()
    mask[1:] = 0
    first = {name: value[:1] for name, value in vars(batch).items()}
    gradients = []
    for term in (loss_of(batch, config(alpha=1.0), mask=mask), loss_of(batch, config(alpha=1.0), **first)):
        gradients.append((term.mean(), grad(term.mean(), batch.logprobs)[0]))
    assert all(torch.equal(found, expected) for found, expected in zip(*gradients, strict=True))


@few
@given(seed=seeds)
def test_ppo_clip_loss_is_grpo_without_kl_and_exploration(random_batch, seed):
    batch = random_batch(seed)
    term, metrics = ppo_clip_loss(
        batch.logprobs, batch.old, batch.advantages, batch.mask,
        clip_low=0.1, clip_high=0.3, dual_clip=1.2, reduction="token-mean",
    )
    settings_ = config(beta=0.0, clip_low=0.1, clip_high=0.3, dual_clip=1.2, aggregation="token-mean")
    expected, expected_metrics = loss_and_metrics(batch, settings_)
    assert torch.equal(term.sum, expected.sum) and term.count == expected.count
    assert torch.equal(grad(term.sum, batch.logprobs)[0], grad(expected.sum, batch.logprobs)[0])
    assert metrics.keys() == {"log_ratio", *(f"clip{part}_fraction" for part in ("", "_low", "_high", "_dual"))}
    for name, metric in metrics.items():
        assert torch.equal(metric.mean(), expected_metrics[name].mean()) and not metric.sum.requires_grad


def test_ppo_clip_loss_has_the_value_of_its_equation_on_a_hand_computed_batch():
    ratio = torch.tensor([[1.5, 0.5], [1.5, 0.5]], dtype=torch.float64)
    loss, metrics = ppo_clip_loss(
        ratio.log(), torch.zeros(2, 2, dtype=torch.float64), torch.tensor([1.0, -1.0]), torch.ones(2, 2),
        clip_low=0.2, clip_high=0.2, reduction="seq-sum",
    )
    # A = 1: min(1.5, 1.2) + min(0.5, 0.8); A = -1: min(-1.5, -1.2) + min(-0.5, -0.8)
    assert (loss.sum.item(), int(loss.count)) == (pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8)), 2)
    assert shares(metrics) == {"": 0.5, "_low": 0.25, "_high": 0.25, "_dual": 0.0}


def shares(metrics: dict) -> dict[str, float]:
    return {part: metrics[f"clip{part}_fraction"].mean().item() for part in ("", "_low", "_high", "_dual")}


def test_shares_of_the_clips_tell_which_bound_holds_a_token():
    ratio = torch.tensor([[0.5, 1.0, 1.3, 4.0, 9.0]], dtype=torch.float64)
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "reduction": "seq-sum"}
    for advantage, expected in (
        (1.0, {"": 0.6, "_low": 0.0, "_high": 0.6, "_dual": 0.0}),
        (-1.0, {"": 0.6, "_low": 0.2, "_high": 0.0, "_dual": 0.4}),
        (0.0, {"": 0.0, "_low": 0.0, "_high": 0.0, "_dual": 0.0}),
    ):
        _, metrics = ppo_clip_loss(
            ratio.log(), torch.zeros_like(ratio), torch.tensor([advantage]), torch.ones(1, 5), **options)
        assert shares(metrics) == pytest.approx(expected), advantage


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_low": 1.0}, "clip_low is 1.0"),
        ({"clip_low": torch.nan}, "clip_low is nan"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"reduction": "mean"}, "reduction is 'mean'"),
        ({"reduction": "seq-mean-token-sum-norm"}, "norm_length is None"),
    ],
)
def test_ppo_settings_out_of_range_are_named(random_batch, changes, message):
    batch = random_batch(0)
    with pytest.raises(ValueError, match=f"^{message}"):
        ppo_clip_loss(
            batch.logprobs, batch.old, batch.advantages, batch.mask,
            **{"clip_low": 0.2, "clip_high": 0.2, "reduction": "seq-sum", **changes},
        )


@few
@given(seed=seeds, scale=st.sampled_from([1e-3, 1e-2]))
def test_with_sequence_advantages_gspo_token_is_plain_gspo(random_batch, seed, scale):
    batch = random_batch(seed)
    logprobs = (batch.old + scale * (batch.logprobs.detach() - batch.old)).requires_grad_()
    rows = batch.lengths > 0
    s = (((logprobs - batch.old) * batch.mask).sum(1)[rows] / batch.lengths[rows]).exp()
    a = batch.advantages[rows]
    expected = -torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a).mean()
    found = loss_of(batch, gspo_config(), logprobs=logprobs, ref=None).mean()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grad(found, logprobs)[0], grad(expected, logprobs)[0], rtol=0, atol=1e-12)


def test_gspo_keeps_or_clips_a_whole_sequence(random_batch):
    batch = random_batch(0)
    settings_ = gspo_config(clip_low=0.05, clip_high=0.05)
    _, metrics = loss_and_metrics(batch, settings_, ref=None)
    gradient = gradient_of(batch, settings_, ref=None)
    clipped = [row for row in range(6) if batch.lengths[row] > 0 and not gradient[row].any()]
    kept = [row for row in range(6) if gradient[row].any()]
    assert clipped and kept
    assert all(gradient[row, : batch.lengths[row]].all() for row in kept)
    assert metrics["clip_fraction"].sum.item() == sum(batch.lengths[row].item() for row in clipped)


def test_gspo_token_gives_each_token_its_own_advantage_times_the_sequence_ratio(random_batch):
    batch = random_batch(0)
    advantages = batch.ref.abs()  # [B, T], positive: the wide clip below holds none of them
    settings_ = gspo_config(clip_high=100.0)
    found = gradient_of(batch, settings_, advantages=advantages, ref=None)
    lengths = batch.lengths.clamp(min=1)[:, None]
    s = (((batch.logprobs - batch.old) * batch.mask).sum(1, keepdim=True) / lengths).exp().detach()
    expected = -s * advantages * batch.mask / lengths / (batch.lengths > 0).sum()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_named_methods_are_the_settings_of_their_papers():
    dapo, dr_grpo, gspo = dapo_config(), dr_grpo_config(512), gspo_config()
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token-mean")
    assert (dr_grpo.clip_low, dr_grpo.clip_high) == (0.2, 0.2)
    assert (dr_grpo.aggregation, dr_grpo.norm_length) == ("seq-mean-token-sum-norm", 512)
    assert (gspo.importance_sampling_level, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    assert gspo.aggregation == "seq-mean-token-mean"
    for settings_ in (dapo, dr_grpo, gspo):
        assert settings_.beta == 0 and settings_.exploration_weight == 0


def test_a_named_method_explores_only_where_a_change_says_so():
    assert dapo_config(beta=0.1).exploration_weight == 0
    assert dapo_config(beta=0.1, alpha=0.5).exploration_weight == 0.05
    assert gspo_config(exploration_coefficient=0.2).exploration_weight == 0.2
    assert dr_grpo_config(8, clip_high=0.5).clip_high == 0.5
    with pytest.raises(TypeError, match="clip_hgih"):
        dapo_config(clip_hgih=0.3)


def test_dapo_and_dr_grpo_divide_by_tokens_and_by_a_constant():
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    zeros, advantages = torch.zeros(2, 3), torch.tensor([1.0, -2.0])
    dapo, _ = grpo_loss(zeros, zeros, None, advantages, mask, dapo_config())
    dr_grpo, _ = grpo_loss(zeros, zeros, None, advantages, mask, dr_grpo_config(10))
    assert dapo.mean().item() == pytest.approx(-(3 * 1.0 - 2.0) / 4)
    assert dr_grpo.mean().item() == pytest.approx(-(3 * 1.0 - 2.0) / 10 / 2)


def test_sampler_log_probabilities_without_a_correction_only_add_metrics(random_batch):
    batch = random_batch(0)
    plain, plain_metrics = loss_and_metrics(batch, config(alpha=1.0))
    found, metrics = loss_and_metrics(batch, config(alpha=1.0), sampler_logprobs=batch.old - 0.2)
    assert torch.equal(found.sum, plain.sum)
    assert metrics["sampler_gap"].mean().item() == pytest.approx(0.2)
    assert metrics.keys() - plain_metrics.keys() == {"sampler_gap", "sampler_ratio", "sampler_kl_k1", "sampler_kl_k3"}


@pytest.mark.parametrize(
    ("changes", "weight", "bounded"),
    [
        ({"sampler_correction": "tis", "tis_cap": 2.0}, (2.0 + 1.0 + 0.5 + 2.0) / 4, 1 / 4),
        ({"sampler_correction": "icepop", "icepop_low": 0.6, "icepop_high": 5.0}, (4.0 + 1.0 + 0.0 + 2.0) / 4, 1 / 4),
    ],
)
def test_metrics_tell_the_mean_weight_and_the_share_of_bounded_tokens(changes, weight, bounded):
    ratios = torch.tensor([[4.0, 1.0, 0.5, 2.0, 9.0]], dtype=torch.float64)
    zeros, mask = torch.zeros(1, 5, dtype=torch.float64), torch.tensor([[1, 1, 1, 1, 0]])
    term, metrics = grpo_loss(
        zeros, zeros, zeros, torch.ones(1), mask, config(aggregation="token-mean", **changes),
        sampler_logprobs=-ratios.log(),
    )
    assert metrics["sampler_weight"].mean().item() == pytest.approx(weight)
    assert metrics["sampler_bounded"].mean().item() == bounded
    assert term.mean().item() == pytest.approx(-weight)
    assert int(term.count) == 4  # a dropped token still counts


def test_sampler_weights_leave_the_kl_to_the_reference_alone(random_batch):
    batch = random_batch(0)
    settings_ = config(beta=0.5, sampler_correction="tis")
    weighted = gradient_of(batch, settings_, advantages=torch.zeros(6), sampler_logprobs=batch.ref)
    plain = gradient_of(batch, config(beta=0.5), advantages=torch.zeros(6))
    assert torch.equal(weighted, plain) and plain.any()


@few
@given(seed=seeds)
def test_exploration_weights_of_zero_leave_responses_out_and_the_count_alone(random_batch, seed):
    batch = random_batch(seed)
    kept = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    settings_ = config(alpha=2.0)
    base, explored = gradient_of(batch, config()), gradient_of(batch, settings_)
    found = gradient_of(batch, settings_, exploration_weights=kept)
    torch.testing.assert_close(found, torch.where(kept[:, None] == 1, explored, base), rtol=0, atol=1e-13)
    assert loss_of(batch, settings_, exploration_weights=kept).count == loss_of(batch, settings_).count


def test_clip_cov_takes_the_surrogates_gradient_of_selected_tokens_and_keeps_its_value(random_batch):
    batch = random_batch(0)
    selected = torch.arange(30).view(6, 5) % 3 == 0
    settings_ = config(beta=0.0, clip_high=100.0, clip_low=0.99)
    controlled = config(beta=0.0, clip_high=100.0, clip_low=0.99, covariance_control="clip-cov")
    plain = gradient_of(batch, settings_)
    found, metrics = loss_and_metrics(batch, controlled, selected=selected)
    gradient = grad(found.mean(), batch.logprobs)[0]
    assert torch.equal(found.mean(), loss_of(batch, settings_).mean())
    assert torch.equal(gradient, torch.where(selected, 0.0, plain)) and plain[selected].any()
    share = (selected & (batch.mask == 1)).sum() / batch.mask.sum()
    assert metrics["selected_fraction"].mean().item() == pytest.approx(share.item())


def test_kl_cov_adds_its_coefficient_times_the_absolute_log_ratio_of_selected_tokens(random_batch):
    batch = random_batch(0)
    selected = (torch.arange(30).view(6, 5) % 3 == 0).to(torch.int64)
    settings_ = config(aggregation="token-mean", covariance_control="kl-cov", kl_cov_coefficient=0.7)
    found, metrics = loss_and_metrics(batch, settings_, selected=selected)
    penalty = ((batch.logprobs - batch.old).abs() * selected * batch.mask).sum() / batch.mask.sum()
    plain = loss_of(batch, config(aggregation="token-mean"))
    torch.testing.assert_close(found.mean(), plain.mean() + 0.7 * penalty)
    assert metrics["kl_cov"].mean().item() == pytest.approx(penalty.item())
    assert not metrics["kl_cov"].sum.requires_grad


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"sampler_correction": "tis"}, {}, "sampler_logprobs is None, but sampler_correction is 'tis'"),
        ({"sampler_correction": "icepop"}, {}, "sampler_logprobs is None, but sampler_correction is 'icepop'"),
        ({}, {"sampler_logprobs": torch.zeros(2, 5)}, r"sampler_logprobs has shape \(2, 5\)"),
        ({}, {"sampler_logprobs": torch.full((6, 5), torch.nan)}, "sampler_logprobs has NaN"),
        ({}, {"exploration_weights": torch.zeros(5)}, r"exploration_weights has shape \(5,\)"),
        ({}, {"exploration_weights": torch.full((6,), torch.inf)}, "exploration_weights has NaN or infinite"),
        ({}, {"selected": torch.ones(6, 5)}, "selected is given, but covariance_control is none"),
        ({"covariance_control": "clip-cov"}, {}, "selected is None, but covariance_control is 'clip-cov'"),
        ({"covariance_control": "kl-cov"}, {}, "selected is None, but covariance_control is 'kl-cov'"),
        ({"covariance_control": "kl-cov"}, {"selected": torch.ones(6)}, r"selected has shape \(6,\)"),
        ({"covariance_control": "kl-cov"}, {"selected": torch.full((6, 5), 0.5)}, "selected has values other than"),
    ],
)
def test_options_and_their_tensors_must_fit_each_other(random_batch, changes, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        loss_of(random_batch(0), config(**changes), **options)
