import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from nemo_edo import losses
from nemo_edo.config import AGGREGATIONS, GRPOLossConfig
from nemo_edo.config.losses import KL_ESTIMATORS, SAMPLER_CORRECTIONS
from nemo_edo.losses.term import ROWS

few = settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
OPTIONS = ("sampler_logprobs", "exploration_factors", "selected", "exploration_weight", "rows", "on_empty")


CHOICES = {
    "aggregation": AGGREGATIONS, "beta": (0.0, 0.3), "exploration_coefficient": (0.01, 0.3, 1.0, 2.0),
    "surrogate": ("clip", "clip", "cispo", "reinforce"), "importance_sampling_level": ("token", "sequence"),
    "clip_low": (0.1, 0.2), "clip_high": (0.2, 0.28), "dual_clip": (None, 1.3), "log_ratio_floor": (None, -0.1),
    "kl_estimator": [name for name in KL_ESTIMATORS if name != "k1"], "kl_importance": ("none", "on-policy", "ratio"),
    "sampler_correction": SAMPLER_CORRECTIONS, "sampler_level": ("token", "sequence"),
    "exploration_tokens": (None, 2), "exploration_control": ("none", "noise"),
    "covariance_control": ("none", "clip-cov", "kl-cov"),
}


def fitting(changes: dict) -> dict:
    """Without the settings that others rule out."""
    if changes["surrogate"] != "clip":
        changes |= {"dual_clip": None, "importance_sampling_level": "token"}
    if changes["sampler_correction"] not in ("tis", "icepop"):
        changes["sampler_level"] = "token"
    return {**changes, "alpha": None, "tis_cap": 1.1, "icepop_low": 0.6, "icepop_high": 1.5, "sequence_mask_low": 0.9,
            "sequence_mask_high": 1.2}


any_changes = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}).map(fitting)


def config(**changes) -> GRPOLossConfig:
    return GRPOLossConfig(**{"norm_length": 7, "alpha": 0.0, **changes})


def with_options(batch, seed: int, settings_: GRPOLossConfig):
    """The batch with every optional argument of the loss that the config takes; odd seeds have token advantages."""
    generator, shape = torch.Generator().manual_seed(seed), batch.mask.shape
    batch.sampler_logprobs = batch.old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    batch.exploration_factors = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    if seed % 2:
        batch.advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    if settings_.covariance_control != "none":
        batch.selected = torch.rand(shape, generator=generator) < 0.4
    return batch


def loss_and_metrics(batch, settings_, **changes):
    values = {**vars(batch), **changes}
    arguments = [values[name] for name in ("logprobs", "old", "ref", "advantages", "mask")]
    return losses.grpo_loss(*arguments, settings_, **{name: values[name] for name in OPTIONS if name in values})


def dense_grpo(batch, settings_, counts="non-empty"):
    """The mean loss, its gradient and the sampler's weights from the formulas, token by token, in plain Python."""
    rows = [row for row in range(len(batch.lengths)) if batch.lengths[row] > 0]
    tokens = sum(int(batch.lengths[row]) for row in rows)
    counted = len(batch.lengths) if counts == "all" else len(rows)
    loss, gradient, weights = 0.0, torch.zeros_like(batch.old), []
    for row in rows:
        length = int(batch.lengths[row])
        divisor = {
            "seq-mean-token-mean": length * counted,
            "token-mean": tokens,
            "seq-mean-token-sum-norm": settings_.norm_length * counted,
        }[settings_.aggregation]
        log_ratios = [(batch.logprobs[row, t] - batch.old[row, t]).item() for t in range(length)]
        gaps = (batch.old - batch.sampler_logprobs)[row, :length].tolist()
        for t, log_ratio in enumerate(log_ratios):
            at_level = sum(log_ratios) / length if settings_.importance_sampling_level == "sequence" else log_ratio
            weights.append(dense_sampler_weight(settings_, gaps, t))
            value, slope = dense_token(batch, settings_, row, t, math.exp(at_level), log_ratio, weights[-1])
            loss += value / divisor
            gradient[row, t] = slope / divisor
    return loss, gradient, weights


def dense_sampler_weight(settings_, gaps, t):
    ratio = math.exp(sum(gaps) if settings_.sampler_level == "sequence" else gaps[t])
    if settings_.sampler_correction == "tis":
        return min(ratio, settings_.tis_cap)
    if settings_.sampler_correction == "icepop":
        return ratio if settings_.icepop_low <= ratio <= settings_.icepop_high else 0.0
    if settings_.sampler_correction == "sequence-mask":
        mean = math.prod(map(math.exp, gaps)) ** (1 / len(gaps))
        return ratio if settings_.sequence_mask_low <= mean <= settings_.sequence_mask_high else 0.0
    return 1.0


def dense_token(batch, settings_, row, t, ratio, log_ratio, weight):
    advantage = batch.advantages.view(len(batch.lengths), -1).expand(batch.mask.shape)[row, t].item()
    clipped = min(max(ratio, 1 - settings_.clip_low), 1 + settings_.clip_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    slope = ratio * advantage if surrogate == ratio * advantage else 0.0
    if settings_.dual_clip is not None and advantage < 0 and surrogate < settings_.dual_clip * advantage:
        surrogate, slope = settings_.dual_clip * advantage, 0.0
    if settings_.surrogate != "clip":
        slope = advantage * (clipped if settings_.surrogate == "cispo" else 1.0)
        surrogate = slope * batch.logprobs[row, t].item()

    selected = settings_.covariance_control != "none" and batch.selected[row, t].item()
    penalty = 0.0
    if selected and settings_.covariance_control == "clip-cov":
        slope = 0.0
    if selected and settings_.covariance_control == "kl-cov":
        penalty = settings_.kl_cov_coefficient * abs(log_ratio)
        slope -= settings_.kl_cov_coefficient * math.copysign(1.0, log_ratio)

    floor = -math.inf if settings_.log_ratio_floor is None else settings_.log_ratio_floor
    factor = settings_.exploration_weight * batch.exploration_factors[row].item()
    factor *= t < (settings_.exploration_tokens or math.inf)
    if settings_.exploration_control == "noise":
        factor *= math.exp(log_ratio)

    d = (batch.logprobs[row, t] - batch.ref[row, t]).item()
    kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[settings_.kl_estimator[:2]]
    kl_slope = d if settings_.kl_estimator != "k3" else 1 - math.exp(-d)
    kl_weight = math.exp(log_ratio) if settings_.kl_importance == "ratio" else 1.0
    kl_slope = kl_weight * (kl_slope + kl * (settings_.kl_importance != "none"))
    kl *= kl_weight
    value = weight * (-surrogate + penalty + factor * max(log_ratio, floor)) + settings_.beta * kl
    return value, weight * (-slope + factor * (log_ratio >= floor)) + settings_.beta * kl_slope


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes, counts=st.sampled_from(ROWS))
def test_every_combination_of_options_agrees_with_the_formulas_written_out(random_batch, seed, changes, counts):
    settings_ = config(**changes)
    batch = with_options(random_batch(seed), seed, settings_)
    expected, gradient, weights = dense_grpo(batch, settings_, counts)
    loss, metrics = loss_and_metrics(batch, settings_, rows=counts)
    assert loss.mean().item() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(grad(loss.mean(), batch.logprobs)[0], gradient, rtol=0, atol=1e-12)
    if settings_.sampler_correction != "none":
        bounded = [weight in (0.0, settings_.tis_cap) for weight in weights]
        assert metrics["sampler_weight"].mean().item() == pytest.approx(fmean(weights))
        assert metrics["sampler_bounded"].mean().item() == pytest.approx(fmean(bounded))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes, counts=st.sampled_from(ROWS),
       cuts=st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_micro_batches_gives_the_same_gradient(random_batch, seed, changes, counts, cuts):
    settings_ = config(**changes)
    batch = with_options(random_batch(seed), seed, settings_)
    whole, whole_metrics = loss_and_metrics(batch, settings_, rows=counts)
    parts, edges = [], [0, *sorted(cuts), 6]
    for start, end in pairwise(edges):
        part = {name: value[start:end] for name, value in vars(batch).items()}
        parts.append(loss_and_metrics(batch, settings_, **part, rows=counts, on_empty="zero"))
    total = sum((term for term, _ in parts[1:]), start=parts[0][0])
    gradients = [grad(term.mean(), batch.logprobs, retain_graph=True)[0] for term in (total, whole)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
    assert total.count == whole.count
    for name, expected in whole_metrics.items():
        found = sum((metrics[name] for _, metrics in parts[1:]), start=parts[0][1][name])
        assert found.mean().item() == pytest.approx(expected.mean().item(), abs=1e-6), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=seeds, changes=any_changes, weight=st.floats(0, 2))
def test_the_loss_is_its_base_plus_exploration_times_the_weight_of_the_step(random_batch, seed, changes, weight):
    configured, with_weight = config(**changes), config(**{**changes, "exploration_coefficient": weight})
    batch = with_options(random_batch(seed), seed, configured)
    results = []
    for settings_, options in ((with_weight, {}), (configured, {"exploration_weight": weight})):
        loss, metrics = loss_and_metrics(batch, settings_, **options)
        results.append([loss.mean(), grad(loss.mean(), batch.logprobs)[0], *(term.sum for term in metrics.values())])
    assert all(map(torch.equal, *results))

    base, _ = loss_and_metrics(batch, config(**{**changes, "exploration_coefficient": None, "alpha": 0.0}))
    options = {name: getattr(batch, name) for name in ("sampler_logprobs", "exploration_factors")}
    term = losses.grpo_exploration(batch.logprobs, batch.old, batch.mask, configured, **options)
    assert torch.equal(term.sum, metrics["exploration"].sum)
    expected = grad(base.plus(term, weight).mean(), batch.logprobs)[0]
    torch.testing.assert_close(results[0][1], expected, rtol=0, atol=1e-13)


@few
@given(seed=seeds, changes=any_changes)
def test_with_alpha_zero_no_exploration_option_changes_a_bit_of_loss_or_gradient(random_batch, seed, changes):
    changes = {**changes, "exploration_coefficient": None, "alpha": 0.0, "beta": 0.3}
    batch, results = with_options(random_batch(seed), seed, config(**changes)), []
    for control, floor, factors in (("none", None, None), ("noise", -0.01, batch.exploration_factors)):
        settings_ = config(**{**changes, "exploration_control": control, "log_ratio_floor": floor})
        loss, _ = loss_and_metrics(batch, settings_, exploration_factors=factors)
        results.append((loss.mean(), grad(loss.mean(), batch.logprobs)[0]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_are_the_unweighted_parts_and_the_shares_of_valid_tokens(random_batch, aggregation, level):
    batch = random_batch(1)
    settings_ = config(aggregation=aggregation, alpha=3.0, log_ratio_floor=-0.1, clip_low=0.1, clip_high=0.1,
                       importance_sampling_level=level)
    loss, metrics = loss_and_metrics(batch, settings_)
    clips = {"clip_fraction", "clip_low_fraction", "clip_high_fraction", "clip_dual_fraction"}
    assert metrics.keys() == {"policy_loss", "kl", "exploration", "log_ratio", "floor_fraction"} | clips
    assert not any(term.sum.requires_grad for term in metrics.values())
    parts = metrics["policy_loss"].plus(metrics["kl"], 0.04).plus(metrics["exploration"], 0.12)
    torch.testing.assert_close(loss.mean(), parts.mean())

    valid, log_ratios = batch.mask == 1, (batch.logprobs - batch.old) * batch.mask
    of_sequences = (log_ratios.sum(1) / batch.lengths.clamp(min=1))[:, None].expand_as(batch.mask)
    ratio, log_ratio = (of_sequences if level == "sequence" else log_ratios)[valid].exp(), log_ratios[valid]
    advantages = batch.advantages[:, None].expand_as(batch.mask)[valid]
    clipped = ((advantages > 0) & (ratio > 1.1)) | ((advantages < 0) & (ratio < 0.9))
    assert metrics["log_ratio"].mean().item() == pytest.approx(log_ratio.mean().item())
    assert metrics["clip_fraction"].mean().item() == pytest.approx(clipped.double().mean().item())
    assert metrics["floor_fraction"].mean().item() == pytest.approx((log_ratio < -0.1).double().mean().item())
    assert clipped.any() and (log_ratio < -0.1).any()

    factors = 1.0 - torch.arange(len(batch.mask)) % 2.0  # of the tokens in the term: the first six of every other row
    few = replace(settings_, exploration_tokens=6)
    _, metrics = loss_and_metrics(batch, few, exploration_factors=factors.to(batch.mask))
    pushed = valid & (valid.cumsum(1) <= 6) & (factors[:, None] == 1)
    share = (log_ratios[pushed] < -0.1).double().mean().item()
    assert metrics["floor_fraction"].mean().item() == pytest.approx(share) and 0 < share < 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"surrogate": "cispo", "dual_clip": 3.0}, "dual_clip is 3.0, expected null with surrogate cispo"),
    ({"surrogate": "reinforce", "importance_sampling_level": "sequence"}, "importance_sampling_level is 'seq"),
    ({"sampler_level": "sequence"}, "sampler_level is 'sequence', expected token"),
    ({"sequence_mask_low": 2.0}, "sequence_mask_low is 2.0, expected a number below sequence_mask_high"),
])
def test_settings_that_exclude_each_other_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        config(**changes)


@few
@given(seed=seeds, low=st.sampled_from([0.0, 0.1]), high=st.sampled_from([0.0, 0.3]), dual=st.sampled_from([None, 1.2]))
def test_ppo_clip_loss_is_grpo_without_kl_and_exploration(random_batch, seed, low, high, dual):
    batch, limits = random_batch(seed), {"clip_low": low, "clip_high": high, "dual_clip": dual}
    tensors = (batch.logprobs, batch.old, batch.advantages, batch.mask)
    term, metrics = losses.ppo_clip_loss(*tensors, reduction="token-mean", **limits)
    expected, expected_metrics = loss_and_metrics(batch, config(beta=0.0, aggregation="token-mean", **limits))
    assert torch.equal(term.sum, expected.sum) and term.count == expected.count
    assert torch.equal(grad(term.sum, batch.logprobs)[0], grad(expected.sum, batch.logprobs)[0])
    assert metrics.keys() == {"log_ratio", *(f"clip{part}_fraction" for part in ("", "_low", "_high", "_dual"))}
    for name, metric in metrics.items():
        assert torch.equal(metric.mean(), expected_metrics[name].mean()) and not metric.sum.requires_grad


def test_the_named_methods_are_the_settings_of_their_papers_without_exploration_unless_a_change_gives_it():
    plain = partial(GRPOLossConfig, alpha=0.0, beta=0.0)
    assert (plain().clip_low, plain().clip_high, plain().aggregation) == (0.2, 0.2, "seq-mean-token-mean")
    assert losses.dapo_config() == plain(clip_high=0.28, aggregation="token-mean")
    assert losses.dr_grpo_config(512) == plain(aggregation="seq-mean-token-sum-norm", norm_length=512)
    assert losses.gspo_config() == plain(importance_sampling_level="sequence", clip_low=3e-4, clip_high=4e-4)
    assert losses.dapo_config(beta=0.1).exploration_weight == 0
    assert losses.dapo_config(beta=0.1, alpha=0.5).exploration_weight == 0.05
    assert losses.gspo_config(exploration_coefficient=0.2).exploration_weight == 0.2
    assert losses.dr_grpo_config(8, clip_high=0.5).clip_high == 0.5
    with pytest.raises(TypeError, match="clip_hgih"):
        losses.dapo_config(clip_hgih=0.3)


# Clip-Cov and KL-Cov


@few
@given(seed=seeds)
def test_covariances_are_the_products_of_deviations_from_the_means_over_valid_tokens(random_batch, seed):
    batch = random_batch(seed)
    valid, advantages = batch.mask == 1, batch.advantages[:, None].expand_as(batch.mask)
    expected = (batch.old - batch.old[valid].mean()) * (advantages - advantages[valid].mean()) * batch.mask
    found = losses.token_covariances(batch.old, batch.advantages, batch.mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert not found[~valid].any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=seeds, share=st.one_of(st.sampled_from([0.0, 2e-4, 1.0]), st.floats(0, 1)))
def test_the_share_of_all_tokens_is_sampled_within_clip_covs_bounds_and_is_kl_covs_highest(random_batch, seed, share):
    batch = random_batch(seed)
    covariances = losses.token_covariances(batch.old, batch.advantages, batch.mask)
    covariances = (2 * covariances).round() / 2  # some are at a bound
    by_clip = losses.clip_cov_selection(covariances, batch.mask, share=share, seed=seed, low=-0.5, high=1.0)
    by_kl = losses.kl_cov_selection(covariances, batch.mask, share=share)
    number = max(int(share * int(batch.mask.sum())), 1 if share > 0 else 0)
    eligible = (batch.mask == 1) & (covariances >= -0.5) & (covariances <= 1.0)
    assert by_clip.dtype == by_kl.dtype == torch.bool
    assert not (by_clip & ~eligible).any() and not (by_kl & (batch.mask == 0)).any()
    assert (int(by_clip.sum()), int(by_kl.sum())) == (min(number, int(eligible.sum())), number)
    left = (batch.mask == 1) & ~by_kl
    if by_kl.any() and left.any():
        assert covariances[by_kl].min() >= covariances[left].max()


def test_the_seed_alone_fixes_clip_covs_selection_and_every_eligible_token_is_as_likely():
    covariances, mask = torch.tensor([[2.0, 0.0, 2.0, 2.0, 2.0]]), torch.ones(1, 5)

    select = partial(losses.clip_cov_selection, covariances, mask, share=0.4, low=1.0, high=5.0)
    state = torch.random.get_rng_state()
    assert all(torch.equal(select(seed=seed), select(seed=seed)) for seed in range(10))
    assert torch.equal(torch.random.get_rng_state(), state)  # the global random state is left alone
    shares = torch.stack([select(seed=seed) for seed in range(800)]).float().mean(0)
    torch.testing.assert_close(shares, covariances / 4, rtol=0, atol=0.07)  # 4 standard errors
