import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad
from torch.nn.functional import cross_entropy

from nemo_edo.losses import (
    DPOLossConfig,
    LossTerm,
    dpo_loss,
    ed_idpo_loss,
    ipo_loss,
    preference_loss,
    preference_metrics,
    ranking_nce_loss,
    selm_loss,
    sequence_logprobs,
    vpo_loss,
    xpo_loss,
)

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
PAIR_NAMES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
PAIR_LOSSES = {"dpo": dpo_loss, "ipo": ipo_loss}
every_pair_loss = pytest.mark.parametrize("loss", PAIR_LOSSES.values(), ids=PAIR_LOSSES)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_pairs(seed: int, count: int = 5) -> list[torch.Tensor]:
    """policy_chosen, policy_rejected (with gradient), ref_chosen, ref_rejected."""
    rows = list(-10 * normal(seed, 4, count).abs() - 1)
    return [row.clone().requires_grad_(i < 2) for i, row in enumerate(rows)]


def ed_idpo(pairs, batch, config, **masks):
    return ed_idpo_loss(*pairs, batch.logprobs, batch.old, batch.mask, config, **masks)


def total_of(terms) -> torch.Tensor:
    preference, added = terms[:2]
    return preference.mean() + added.mean()


# Sequences


def test_sequence_log_probabilities_are_sums_or_means_over_valid_tokens_and_0_for_padding(random_batch):
    batch = random_batch(1)
    assert {0, 1, 5} <= {*batch.lengths.tolist()}
    expected = torch.stack([row[:length].sum() for row, length in zip(batch.logprobs, batch.lengths, strict=True)])
    torch.testing.assert_close(sequence_logprobs(batch.logprobs, batch.mask), expected, rtol=0, atol=1e-12)
    means = sequence_logprobs(batch.logprobs, batch.mask, length_normalized=True)
    torch.testing.assert_close(means, expected / batch.lengths.clamp(min=1), rtol=0, atol=1e-12)
    assert means[2] == 0


# DPO and IPO


def closed_forms(margin: torch.Tensor, beta: float, eps: float) -> dict:
    """Each loss with its options, its values by pair, and their derivative by the margin."""
    h, distance = beta * margin, margin - 0.5 / beta
    smoothed = torch.log1p(torch.exp(-h.abs())) + (-h).clamp(min=0) + eps * h
    return {
        "dpo": (partial(dpo_loss, beta=beta, label_smoothing=eps), smoothed, -beta * (torch.sigmoid(-h) - eps)),
        "ipo": (partial(ipo_loss, beta=beta), distance.square(), 2 * distance),
    }


@pytest.mark.parametrize("name", PAIR_LOSSES)
@few
@given(seed=seeds, beta=st.floats(1e-2, 2), label_smoothing=st.floats(0, 0.49))
def test_dpo_and_ipo_and_their_gradients_equal_the_closed_forms(name, seed, beta, label_smoothing):
    pairs = random_pairs(seed)
    chosen, rejected, ref_chosen, ref_rejected = [x.detach() for x in pairs]
    loss, values, slope = closed_forms(chosen - ref_chosen - rejected + ref_rejected, beta, label_smoothing)[name]
    term = loss(*pairs)
    assert term.count == 5
    torch.testing.assert_close(term.sum, values.sum(), rtol=1e-12, atol=1e-12)
    for found, sign in zip(grad(term.sum, pairs[:2]), (1, -1), strict=True):
        torch.testing.assert_close(found, sign * slope, rtol=1e-10, atol=1e-12)
    if name == "dpo":
        assert loss(chosen, rejected, chosen, rejected).mean().item() == pytest.approx(math.log(2), abs=1e-12)


def test_dpo_neither_overflows_nor_vanishes_at_extreme_margins():
    margins = torch.tensor([-1e6, 1e6], requires_grad=True)
    zeros = torch.zeros(2)
    term = dpo_loss(margins, zeros, zeros, zeros, beta=1.0)
    assert (term.sum.item(), grad(term.sum, margins)[0].tolist()) == (1e6, [-1.0, 0.0])


@every_pair_loss
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e300])
def test_a_padding_pair_contributes_nothing_and_the_reference_gets_no_gradient(loss, garbage):
    pairs = random_pairs(5, count=4)
    mask = torch.tensor([1, 0, 1, 0])
    filled = [torch.where(mask == 1, x.detach(), garbage).requires_grad_() for x in pairs]
    expected = loss(*[x[::2] for x in pairs], beta=0.3)
    found = loss(*filled, beta=0.3, mask=mask)
    assert found.count == 2
    assert torch.equal(found.sum, expected.sum)
    gradients = grad(found.sum, filled, allow_unused=True)
    assert all(map(torch.equal, grad(expected.sum, pairs[:2]), gradients[:2])) and gradients[2:] == (None, None)


@every_pair_loss
@pytest.mark.parametrize(("changes", "message"), [
    ({"ref_rejected": torch.zeros(2)}, r"ref_rejected has shape \(2,\)"),
    ({"mask": torch.ones(2)}, r"mask has shape \(2,\)"),
    ({"mask": torch.ones(3) * 0.5}, "mask has values other than 0 and 1"),
    *(({"beta": beta}, f"beta is {beta}") for beta in (0.0, -0.1, math.nan, math.inf)),
    *(({name: torch.tensor([0.0, bad, 0.0])}, f"{name} has NaN or infinite")
      for name in PAIR_NAMES for bad in (torch.nan, torch.inf, -torch.inf)),
])
def test_arguments_that_do_not_fit_are_named(loss, changes, message):
    arguments = {**dict.fromkeys(PAIR_NAMES, torch.zeros(3)), "beta": 0.1, **changes}
    for function in (loss, preference_metrics):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


def test_the_config_chooses_the_preference_loss():
    pairs, mask = random_pairs(6), torch.tensor([1, 1, 0, 1, 1])
    for config, expected in (
        (DPOLossConfig(beta=0.3), dpo_loss(*pairs, beta=0.3, mask=mask)),
        (DPOLossConfig(beta=0.3, label_smoothing=0.1), dpo_loss(*pairs, beta=0.3, label_smoothing=0.1, mask=mask)),
        (DPOLossConfig(beta=0.3, preference_loss="ipo"), ipo_loss(*pairs, beta=0.3, mask=mask)),
    ):
        found = preference_loss(*pairs, config, mask=mask)
        assert torch.equal(found.sum, expected.sum) and found.count == expected.count == 4


def test_the_metrics_are_implicit_rewards_margin_accuracy_and_log_probabilities_without_gradient():
    policy_chosen = torch.tensor([-1.0, -2.0, -3.0, torch.nan], requires_grad=True)
    policy_rejected = torch.tensor([-4.0, -1.0, -3.0, 0.0], requires_grad=True)
    ref = torch.tensor([-2.0, -2.0, -3.0, 0.0])
    found = preference_metrics(
        policy_chosen, policy_rejected, ref, ref, beta=0.5, mask=torch.tensor([True, True, True, False])
    )
    assert {name: term.sum.item() for name, term in found.items()} == {
        "reward_chosen": 0.5,  # .5 * (1 + 0 + 0)
        "reward_rejected": -0.5,  # .5 * (-2 + 1 + 0)
        "reward_margin": 1.0,
        "reward_accuracy": 1.0,  # a win, a loss, a tie
        "logprobs_chosen": -6.0,
        "logprobs_rejected": -8.0,
    }
    assert all(term.count == 3 and not term.sum.requires_grad for term in found.values())


# ED-iDPO


@pytest.mark.parametrize("settings_", [{}, {"length_normalized": True}, {"preference_loss": "ipo"}], ids=str)
@few
@given(seed=seeds)
def test_alpha_zero_is_the_preference_loss_to_the_last_bit_and_leaves_samples_without_gradient(
    random_batch, settings_, seed
):
    pairs, batch, config = random_pairs(seed), random_batch(seed), DPOLossConfig(alpha=0.0, **settings_)
    terms = ed_idpo(pairs, batch, config)
    base = preference_loss(*pairs, config).mean()
    assert terms[1].sum.item() == 0 and not terms[1].sum.requires_grad
    assert terms[1].count == (batch.lengths > 0).sum()
    assert torch.equal(total_of(terms), base)
    found = grad(total_of(terms), [*pairs[:2], batch.logprobs], allow_unused=True)
    assert all(torch.equal(x, y) for x, y in zip(found[:2], grad(base, pairs[:2]), strict=True))
    assert found[2] is None


@pytest.mark.parametrize("length_normalized", [False, True])
@few
@given(seed=seeds, alpha=st.floats(1e-3, 2), beta=st.floats(1e-2, 2))
def test_exploration_adds_alpha_beta_over_the_number_of_samples_to_each_sampled_token(
    random_batch, length_normalized, seed, alpha, beta
):
    pairs, batch = random_pairs(seed), random_batch(seed)
    config = DPOLossConfig(alpha=alpha, beta=beta, length_normalized=length_normalized)
    terms = ed_idpo(pairs, batch, config)
    found = grad(total_of(terms), [*pairs[:2], batch.logprobs])
    lengths = batch.lengths.clamp(min=1)[:, None] if length_normalized else 1
    expected = alpha * beta * batch.mask / lengths / (batch.lengths > 0).sum()
    torch.testing.assert_close(found[2], expected, rtol=0, atol=1e-12)
    base = grad(preference_loss(*pairs, config).mean(), pairs[:2])
    assert all(torch.equal(x, y) for x, y in zip(found[:2], base, strict=True))
    values = (batch.logprobs - batch.old).detach() * batch.mask / lengths
    torch.testing.assert_close(terms[1].sum.detach(), alpha * beta * values.sum(), rtol=0, atol=1e-12)


@few
@given(seed=seeds, weight=st.floats(0, 2))
def test_a_weight_for_the_step_gives_the_loss_of_a_config_with_it_to_the_last_bit(random_batch, seed, weight):
    pairs, batch = random_pairs(seed), random_batch(seed)
    expected = ed_idpo(pairs, batch, DPOLossConfig(exploration_coefficient=weight))
    found = ed_idpo(pairs, batch, DPOLossConfig(exploration_coefficient=0.3), exploration_weight=weight)
    leaves = [*pairs[:2], batch.logprobs]
    for x, y in zip(*(grad(total_of(terms), leaves, allow_unused=True) for terms in (found, expected)), strict=True):
        assert (x is None and y is None) if weight == 0 and x is None else torch.equal(x, y)
    assert torch.equal(total_of(found), total_of(expected))


def test_the_floor_and_sample_weights_reach_the_exploration_term(random_batch):
    pairs, batch = random_pairs(1), random_batch(1)
    weights = normal(1, 6).abs()
    config = DPOLossConfig(alpha=2.0, beta=0.5, log_ratio_floor=-0.1)
    _, found, metrics = ed_idpo(pairs, batch, config, sample_weights=weights)
    clamped = (batch.logprobs - batch.old).clamp(min=-0.1)
    expected = (weights[:, None] * clamped * batch.mask).sum()
    torch.testing.assert_close(found.sum, expected, rtol=0, atol=1e-12)
    below = ((batch.logprobs - batch.old < -0.1) & (batch.mask == 1)).sum()
    assert 0 < below == metrics["floor_fraction"].sum


@pytest.mark.parametrize("settings_", [{}, {"length_normalized": True, "log_ratio_floor": -0.2}], ids=str)
@few
@given(seed=seeds, pair_cut=st.integers(0, 5), sample_cut=st.integers(0, 6))
def test_any_split_of_pairs_and_samples_gives_the_gradient_of_the_whole(
    random_batch, settings_, seed, pair_cut, sample_cut
):
    pairs, batch, config = random_pairs(seed), random_batch(seed), DPOLossConfig(alpha=3.0, **settings_)
    leaves = [*pairs[:2], batch.logprobs]
    whole_terms = ed_idpo(pairs, batch, config)
    whole = grad(total_of(whole_terms), leaves)
    accumulated = [torch.zeros_like(x) for x in leaves]
    for pair_rows, sample_rows in (
        (slice(0, pair_cut), slice(sample_cut, None)),
        (slice(pair_cut, None), slice(0, sample_cut)),
    ):
        part = SimpleNamespace(**{name: x[sample_rows] for name, x in vars(batch).items()})
        if not part.mask.any():  # padding alone: the micro-batch has no samples
            part = SimpleNamespace(**{name: x[:0] for name, x in vars(part).items()})
        preference, exploration, _ = ed_idpo([x[pair_rows] for x in pairs], part, config)
        share = preference.sum / whole_terms[0].count + exploration.sum / whole_terms[1].count
        for total, x in zip(accumulated, grad(share, leaves, allow_unused=True), strict=True):
            total += 0 if x is None else x  # None: this micro-batch has no samples
    for found, expected in zip(accumulated, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_ed_idpo_metrics_are_unweighted_and_without_gradient(random_batch):
    pairs, batch, config = random_pairs(8), random_batch(8), DPOLossConfig(alpha=3.0)
    preference, _, metrics = ed_idpo(pairs, batch, config)
    log_ratio = ((batch.logprobs - batch.old) * batch.mask).sum().item()
    samples, tokens = int((batch.lengths > 0).sum()), int(batch.lengths.sum())
    for name, value, count in (
        ("preference_loss", preference.sum.item(), 5),
        ("exploration", log_ratio, samples),
        ("log_ratio", log_ratio, tokens),
        ("floor_fraction", 0.0, tokens),
        ("response_length", tokens, samples),
    ):
        assert (metrics[name].sum.item(), int(metrics[name].count)) == (pytest.approx(value, abs=1e-12), count)
    for name, term in preference_metrics(*pairs, beta=config.beta).items():
        assert torch.equal(metrics[name].sum, term.sum)
    assert not any(term.sum.requires_grad for term in metrics.values())


@pytest.mark.parametrize(("changes", "message"), [
    ({"pair_mask": torch.ones(4)}, r"pair_mask has shape \(4,\)"),
    ({"pair_mask": torch.full((3,), 2.0)}, "pair_mask has values other than 0 and 1"),
    ({"sample_mask": torch.ones(2, 5)}, r"sample_mask has \(2, 5\)"),
    ({"sample_mask": torch.zeros(2, 4)}, "mask is empty"),
    ({"sample_old_logprobs": torch.zeros(2, 5)}, r"sample_old_logprobs has shape \(2, 5\)"),
    ({"sample_logprobs": torch.full((2, 4), torch.nan)}, "sample_logprobs has NaN or infinite"),
    ({"sample_weights": torch.zeros(3)}, r"weights has shape \(3,\)"),
    *(({"exploration_weight": weight}, "^exploration_weight is") for weight in (-0.1, math.nan, math.inf)),
])
def test_ed_idpo_names_the_argument_that_does_not_fit_even_with_alpha_zero(changes, message):
    arguments = {
        **dict.fromkeys(PAIR_NAMES, torch.zeros(3)),
        **dict.fromkeys(("sample_logprobs", "sample_old_logprobs"), torch.zeros(2, 4)),
        "sample_mask": torch.ones(2, 4),
        "config": DPOLossConfig(alpha=0.0),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        ed_idpo_loss(**arguments)


# XPO, SELM, VPO


def xpo(*arguments, **options):
    return xpo_loss(*arguments[:5], **options)


online_vpo, offline_vpo = partial(vpo_loss, setting="online"), partial(vpo_loss, setting="offline")


# Name, function, and the factor on log pi_theta of the samples' mean for alpha 0.4 and beta 0.25.
BIASED = {
    "xpo": (xpo, 0.4),
    "selm": (selm_loss, 0.1),
    "vpo online": (online_vpo, 0.1),
    "vpo offline": (offline_vpo, -0.1),
}
every_bias = pytest.mark.parametrize(("loss", "factor"), BIASED.values(), ids=BIASED)


@every_bias
@few
@given(seed=seeds)
def test_the_bias_is_its_coefficient_times_the_samples_log_ratio_next_to_the_dpo_term(loss, factor, seed):
    pairs, samples, ref = random_pairs(seed), normal(seed + 1, 3).requires_grad_(), normal(seed + 2, 3)
    preference, bias = loss(*pairs, samples, ref, alpha=0.4, beta=0.25)
    base = dpo_loss(*pairs, beta=0.25)
    assert torch.equal(preference.sum, base.sum) and preference.count == 5 and bias.count == 3
    values = samples if loss is xpo else samples - ref
    torch.testing.assert_close(bias.sum, factor * values.sum(), rtol=1e-12, atol=1e-12)
    gradient = grad(total_of((preference, bias)), samples)[0]
    torch.testing.assert_close(gradient, torch.full_like(gradient, factor / 3), rtol=1e-12, atol=0)

    terms = loss(*pairs, samples, ref, alpha=0.0, beta=0.25)
    assert (terms[1].sum.item(), terms[1].sum.requires_grad, int(terms[1].count)) == (0.0, False, 3)
    assert torch.equal(total_of(terms), base.mean())


# Ranking


def scores(seed: int, *shape: int) -> torch.Tensor:
    return (3 * normal(seed, *shape)).requires_grad_()


@few
@given(seed=seeds, negatives=st.integers(1, 6), l2=st.floats(0, 2))
def test_softmax_weighting_is_cross_entropy_with_the_positive_as_label_and_the_penalty(seed, negatives, l2):
    positive, negative = scores(seed, 4), scores(seed + 1, 4, negatives)
    expected = cross_entropy(torch.cat([positive[:, None], negative], dim=1), torch.zeros(4).long(), reduction="sum")
    expected = expected + l2 * (positive.square() + negative.square().mean(dim=1)).sum()
    term = ranking_nce_loss(positive, negative, l2=l2)
    assert term.count == 4
    torch.testing.assert_close(term.sum, expected, rtol=1e-12, atol=1e-12)
    for x, y in zip(grad(term.sum, [positive, negative]), grad(expected, [positive, negative]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@few
@given(seed=seeds, l2=st.floats(0, 2))
def test_uniform_weighting_pushes_every_negative_down_alike_and_as_much_in_all_as_the_positive_up(seed, l2):
    positive, negative = scores(seed, 4), scores(seed + 1, 4, 5)
    term = ranking_nce_loss(positive, negative, weighting="uniform", l2=l2)
    penalty = l2 * (positive.square() + negative.square().mean(dim=1))
    torch.testing.assert_close(term.sum, (negative.mean(dim=1) - positive + penalty).sum(), rtol=1e-12, atol=1e-12)
    on_positive, on_negative = grad(term.sum, [positive, negative])
    torch.testing.assert_close(on_positive, (2 * l2 * positive - 1).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(on_negative, ((2 * l2 * negative + 1) / 5).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gap", "expected"), [
    (1e6, 0.0), (-1e6, 1e6 + math.log(2)), (40.0, 2 * math.exp(-40.0)),
    (-21.0, 21 + math.log(2) + math.log1p(math.exp(-21) / 2)),
])
def test_softmax_weighting_is_stable_and_exact_at_large_gaps(gap, expected):
    positive = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    negative = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    term = ranking_nce_loss(positive, negative)
    assert term.sum.item() == pytest.approx(expected, rel=1e-12, abs=0)
    assert all(x.isfinite().all() for x in grad(term.sum, [positive, negative]))


@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_ragged_negatives_equal_questions_taken_one_by_one(weighting, garbage):
    counts = [3, 1, 0, 2]
    mask = (torch.arange(3) < torch.tensor(counts)[:, None]).double()
    positive = torch.where(mask.any(dim=1), scores(1, 4).detach(), garbage).requires_grad_()
    negative = torch.where(mask == 1, scores(2, 4, 3).detach(), garbage).requires_grad_()
    options = {"l2": 0.1, "weighting": weighting}
    whole = ranking_nce_loss(positive, negative, negative_mask=mask, **options)
    one_by_one = LossTerm(torch.zeros((), dtype=torch.float64), 0)
    for q, k in enumerate(counts):
        if k:
            one_by_one = one_by_one + ranking_nce_loss(positive[q : q + 1], negative[q : q + 1, :k], **options)
    assert whole.count == one_by_one.count == 3  # the question without a negative does not count
    torch.testing.assert_close(whole.sum, one_by_one.sum, rtol=1e-12, atol=1e-12)
    expected = grad(one_by_one.sum, [positive, negative])
    for found, x in zip(grad(whole.sum, [positive, negative]), expected, strict=True):
        torch.testing.assert_close(found, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("changes", "message"), [
    ({"weighting": "mean"}, "weighting is 'mean'"), ({"l2": -0.1}, "l2 is -0.1"),
    ({"positive_scores": torch.zeros(3)}, r"positive_scores has shape \(3,\) and negative_scores \(2, 4\)"),
    ({"negative_mask": torch.ones(2, 3)}, r"negative_mask has shape \(2, 3\), expected \(2, 4\)"),
    ({"negative_mask": torch.full((2, 4), 0.5)}, "negative_mask has values other than 0 and 1"),
    ({"negative_scores": torch.full((2, 4), torch.nan)}, "negative_scores has NaN or infinite"),
])
def test_ranking_nce_names_the_argument_that_does_not_fit(changes, message):
    arguments = {"positive_scores": torch.zeros(2), "negative_scores": torch.zeros(2, 4), **changes}
    with pytest.raises(ValueError, match=message):
        ranking_nce_loss(**arguments)
