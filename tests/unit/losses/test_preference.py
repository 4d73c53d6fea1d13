import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad
from torch.nn.functional import cross_entropy

from nemo_edo import losses
from nemo_edo.config import DPOLossConfig

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_pairs(seed: int, count: int = 5) -> list[torch.Tensor]:
    """policy_chosen, policy_rejected (with gradient), ref_chosen, ref_rejected."""
    rows = list(-10 * normal(seed, 4, count).abs() - 1)
    return [row.clone().requires_grad_(i < 2) for i, row in enumerate(rows)]


def ed_idpo(pairs, batch, config, **masks):
    return losses.ed_idpo_loss(*pairs, batch.logprobs, batch.old, batch.mask, config, **masks)


def total_of(terms) -> torch.Tensor:
    preference, added = terms[:2]
    return preference.mean() + added.mean()


# Sequences


def test_sequence_log_probabilities_are_sums_or_means_over_valid_tokens_and_0_for_padding(random_batch):
    batch = random_batch(1)
    assert {0, 1, 5} <= {*batch.lengths.tolist()}
    expected = torch.stack([row[:length].sum() for row, length in zip(batch.logprobs, batch.lengths, strict=True)])
    close(losses.sequence_logprobs(batch.logprobs, batch.mask), expected)
    means = losses.sequence_logprobs(batch.logprobs, batch.mask, length_normalized=True)
    close(means, expected / batch.lengths.clamp(min=1))
    assert means[2] == 0


# DPO and IPO


@pytest.mark.parametrize("name", ["dpo", "ipo"])
@few
@given(seed=seeds, beta=st.floats(1e-2, 2), eps=st.floats(0, 0.49))
def test_dpo_and_ipo_and_their_gradients_equal_the_closed_forms(name, seed, beta, eps):
    pairs = random_pairs(seed)
    chosen, rejected, ref_chosen, ref_rejected = pairs
    margin = chosen - ref_chosen - rejected + ref_rejected
    if name == "dpo":
        term, h = losses.dpo_loss(*pairs, beta=beta, label_smoothing=eps), beta * margin
        values = torch.log1p(torch.exp(-h.abs())) + (-h).clamp(min=0) + eps * h
        at_reference = losses.dpo_loss(chosen, rejected, chosen, rejected, beta=beta, label_smoothing=eps)
        assert at_reference.mean().item() == pytest.approx(math.log(2), abs=1e-12)
    else:
        term, values = losses.ipo_loss(*pairs, beta=beta), (margin - 0.5 / beta).square()
    assert term.count == 5
    close(term.sum, values.sum(), rtol=1e-12)
    close(grad(term.sum, pairs[:2]), grad(values.sum(), pairs[:2]), rtol=1e-10)


def test_dpo_neither_overflows_nor_vanishes_at_extreme_margins():
    margins = torch.tensor([-1e6, 1e6], requires_grad=True)
    zeros = torch.zeros(2)
    term = losses.dpo_loss(margins, zeros, zeros, zeros, beta=1.0)
    assert (term.sum.item(), grad(term.sum, margins)[0].tolist()) == (1e6, [-1.0, 0.0])


def test_the_config_chooses_the_preference_loss():
    pairs, mask = random_pairs(6), torch.tensor([1, 1, 0, 1, 1])
    for function, options, choice in (
        (losses.dpo_loss, {}, {}),
        (losses.dpo_loss, {"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        (losses.ipo_loss, {}, {"preference_loss": "ipo"}),
    ):
        found = losses.preference_loss(*pairs, DPOLossConfig(beta=0.3, **choice), mask=mask)
        expected = function(*pairs, beta=0.3, mask=mask, **options)
        assert torch.equal(found.sum, expected.sum) and found.count == expected.count == 4


def test_the_metrics_are_implicit_rewards_margin_accuracy_and_log_probabilities_without_gradient():
    policy_chosen = torch.tensor([-1.0, -2.0, -3.0, torch.nan], requires_grad=True)
    policy_rejected = torch.tensor([-4.0, -1.0, -3.0, 0.0], requires_grad=True)
    ref, mask = torch.tensor([-2.0, -2.0, -3.0, 0.0]), torch.tensor([True, True, True, False])
    found = losses.preference_metrics(policy_chosen, policy_rejected, ref, ref, beta=0.5, mask=mask)
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
def test_alpha_zero_is_the_preference_loss_to_the_last_bit_and_samples_get_no_gradient(random_batch, settings_, seed):
    pairs, batch, config = random_pairs(seed), random_batch(seed), DPOLossConfig(alpha=0.0, **settings_)
    terms = ed_idpo(pairs, batch, config)
    base = losses.preference_loss(*pairs, config).mean()
    assert terms[1].sum.item() == 0 and not terms[1].sum.requires_grad
    assert terms[1].count == (batch.lengths > 0).sum()
    assert torch.equal(total_of(terms), base)
    found = grad(total_of(terms), [*pairs[:2], batch.logprobs], allow_unused=True)
    assert all(torch.equal(x, y) for x, y in zip(found[:2], grad(base, pairs[:2]), strict=True))
    assert found[2] is None
    stepped = ed_idpo(pairs, batch, DPOLossConfig(exploration_coefficient=0.3, **settings_), exploration_weight=0.0)
    assert torch.equal(total_of(stepped), base)


@pytest.mark.parametrize("length_normalized", [False, True])
@few
@given(seed=seeds, alpha=st.floats(1e-3, 2), beta=st.floats(1e-2, 2), floor=st.sampled_from([None, -0.1]),
       weighted=st.booleans())
def test_exploration_adds_alpha_beta_over_the_number_of_samples_to_each_sampled_token_above_the_floor(
    random_batch, length_normalized, seed, alpha, beta, floor, weighted
):
    pairs, batch, weights = random_pairs(seed), random_batch(seed), normal(seed, 6).abs() if weighted else None
    config = DPOLossConfig(alpha=alpha, beta=beta, length_normalized=length_normalized, log_ratio_floor=floor)
    preference, added, metrics = ed_idpo(pairs, batch, config, sample_weights=weights)
    leaves = [*pairs[:2], batch.logprobs]
    found = grad(total_of((preference, added)), leaves)
    samples, tokens = int((batch.lengths > 0).sum()), int(batch.lengths.sum())
    log_ratio = (batch.logprobs - batch.old).detach() * batch.mask
    below = (log_ratio < (floor or -math.inf)) & (batch.mask == 1)
    shares = batch.mask * (weights[:, None] if weighted else 1)
    shares = shares / (batch.lengths.clamp(min=1)[:, None] if length_normalized else 1)
    close(found[2], alpha * beta * torch.where(below, 0.0, shares) / samples)
    base = losses.preference_loss(*pairs, config)
    assert all(map(torch.equal, found, grad(base.mean(), pairs[:2])))
    value = (torch.where(below, floor or 0.0, log_ratio) * shares).sum()
    close(added.sum.detach(), alpha * beta * value)

    expected = {"preference_loss": (base.sum.detach(), 5), "exploration": (value, samples),
                "log_ratio": (log_ratio.sum(), tokens), "floor_fraction": (below.sum(), tokens),
                "response_length": (tokens, samples),
                **{name: (term.sum, 5) for name, term in losses.preference_metrics(*pairs, beta=beta).items()}}
    assert metrics.keys() == expected.keys() and not any(term.sum.requires_grad for term in metrics.values())
    for name, (total, count) in expected.items():
        assert (float(metrics[name].sum), int(metrics[name].count)) == (pytest.approx(float(total), abs=1e-12), count)

    # A weight for the step gives the loss of a config with it, to the last bit.
    other = DPOLossConfig(**{**vars(config), "alpha": None, "exploration_coefficient": 0.3})
    again = total_of(ed_idpo(pairs, batch, other, sample_weights=weights, exploration_weight=alpha * beta))
    assert torch.equal(again, total_of((preference, added))) and all(map(torch.equal, grad(again, leaves), found))


@pytest.mark.parametrize("settings_", [{}, {"length_normalized": True, "log_ratio_floor": -0.2}], ids=str)
@few
@given(seed=seeds, pair_cut=st.integers(0, 5), sample_cut=st.integers(0, 6))
def test_any_split_of_pairs_and_samples_gives_the_whole_gradient(random_batch, settings_, seed, pair_cut, sample_cut):
    pairs, batch, config = random_pairs(seed), random_batch(seed), DPOLossConfig(alpha=3.0, **settings_)
    leaves = [*pairs[:2], batch.logprobs]
    whole = ed_idpo(pairs, batch, config)
    total = 0.0
    for pair_rows, sample_rows in (
        (slice(0, pair_cut), slice(sample_cut, None)),
        (slice(pair_cut, None), slice(0, sample_cut)),
    ):
        if not batch.mask[sample_rows].any():  # padding alone: the micro-batch has no samples
            sample_rows = slice(0, 0)
        part = SimpleNamespace(**{name: x[sample_rows] for name, x in vars(batch).items()})
        preference, exploration, _ = ed_idpo([x[pair_rows] for x in pairs], part, config)
        total += preference.sum / whole[0].count + exploration.sum / whole[1].count
    close(grad(total, leaves), grad(total_of(whole), leaves), atol=1e-10)


# XPO, SELM, VPO


def xpo(*arguments, **options):
    return losses.xpo_loss(*arguments[:5], **options)


@pytest.mark.parametrize(("loss", "factor"), [  # on log pi_theta of the samples' mean, for alpha 0.4 and beta 0.25
    (xpo, 0.4), (losses.selm_loss, 0.1), (losses.vpo_loss, 0.1), (partial(losses.vpo_loss, setting="offline"), -0.1),
], ids=["xpo", "selm", "vpo online", "vpo offline"])
@few
@given(seed=seeds)
def test_the_bias_is_its_coefficient_times_the_samples_log_ratio_next_to_the_dpo_term(loss, factor, seed):
    pairs, samples, ref = random_pairs(seed), normal(seed + 1, 3).requires_grad_(), normal(seed + 2, 3)
    preference, bias = loss(*pairs, samples, ref, alpha=0.4, beta=0.25)
    base = losses.dpo_loss(*pairs, beta=0.25)
    assert torch.equal(preference.sum, base.sum) and preference.count == 5 and bias.count == 3
    values = samples if loss is xpo else samples - ref
    close(bias.sum, factor * values.sum(), rtol=1e-12)
    gradient = grad(total_of((preference, bias)), samples)[0]
    close(gradient, torch.full_like(gradient, factor / 3), rtol=1e-12, atol=0)

    terms = loss(*pairs, samples, ref, alpha=0.0, beta=0.25)
    assert (terms[1].sum.item(), terms[1].sum.requires_grad, int(terms[1].count)) == (0.0, False, 3)
    assert torch.equal(total_of(terms), base.mean())


# Ranking


def scores(seed: int, *shape: int) -> torch.Tensor:
    return (3 * normal(seed, *shape)).requires_grad_()


@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@few
@given(seed=seeds, negatives=st.integers(1, 6), l2=st.floats(0, 2))
def test_ranking_is_cross_entropy_or_the_difference_of_means_and_the_penalty(weighting, seed, negatives, l2):
    positive, negative = scores(seed, 4), scores(seed + 1, 4, negatives)
    if weighting == "softmax":
        rows = torch.cat([positive[:, None], negative], dim=1)
        expected = cross_entropy(rows, torch.zeros(4).long(), reduction="sum")
    else:
        expected = (negative.mean(dim=1) - positive).sum()
    expected = expected + l2 * (positive.square() + negative.square().mean(dim=1)).sum()
    term = losses.ranking_nce_loss(positive, negative, weighting=weighting, l2=l2)
    assert term.count == 4
    close(term.sum, expected, rtol=1e-12)
    close(grad(term.sum, [positive, negative]), grad(expected, [positive, negative]), rtol=1e-10)


@pytest.mark.parametrize(("gap", "expected"), [
    (1e6, 0.0), (-1e6, 1e6 + math.log(2)), (40.0, 2 * math.exp(-40.0)),
    (-21.0, 21 + math.log(2) + math.log1p(math.exp(-21) / 2)),
])
def test_softmax_weighting_is_stable_and_exact_at_large_gaps(gap, expected):
    positive = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    negative = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    term = losses.ranking_nce_loss(positive, negative)
    assert term.sum.item() == pytest.approx(expected, rel=1e-12, abs=0)
    assert all(x.isfinite().all() for x in grad(term.sum, [positive, negative]))


@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
def test_ragged_negatives_equal_questions_taken_one_by_one(weighting):
    counts = [3, 1, 0, 2]
    mask = (torch.arange(3) < torch.tensor(counts)[:, None]).double()
    positive, negative = scores(1, 4), scores(2, 4, 3)
    options = {"l2": 0.1, "weighting": weighting}
    whole = losses.ranking_nce_loss(positive, negative, negative_mask=mask, **options)
    one_by_one = losses.LossTerm(torch.zeros((), dtype=torch.float64), 0)
    for q, k in enumerate(counts):
        if k:
            one_by_one = one_by_one + losses.ranking_nce_loss(positive[q : q + 1], negative[q : q + 1, :k], **options)
    assert whole.count == one_by_one.count == 3  # the question without a negative does not count
    close(whole.sum, one_by_one.sum, rtol=1e-12)
    leaves = [positive, negative]
    close(grad(whole.sum, leaves), grad(one_by_one.sum, leaves), rtol=1e-12)
