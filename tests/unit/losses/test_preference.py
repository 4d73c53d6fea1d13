import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from nemo_edo.losses import (
    DPOLossConfig,
    LossTerm,
    dpo_loss,
    ed_idpo_loss,
    exploration_term,
    ipo_loss,
    preference_loss,
    preference_metrics,
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
    batch.lengths[2], batch.mask[2] = 0, 0
    expected = torch.stack([row[:length].sum() for row, length in zip(batch.logprobs, batch.lengths, strict=True)])
    torch.testing.assert_close(sequence_logprobs(batch.logprobs, batch.mask), expected, rtol=0, atol=1e-12)
    means = sequence_logprobs(batch.logprobs, batch.mask, length_normalized=True)
    torch.testing.assert_close(means, expected / batch.lengths.clamp(min=1), rtol=0, atol=1e-12)
    assert means[2] == 0


@pytest.mark.parametrize("length_normalized", [False, True])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_padding_reaches_neither_sequence_log_probabilities_nor_their_gradient(
    random_batch, garbage, length_normalized
):
    batch = random_batch(2)
    results = []
    for filler in (0.0, garbage):
        logprobs = torch.where(batch.mask == 1, batch.old, filler).requires_grad_()
        value = sequence_logprobs(logprobs, batch.mask, length_normalized=length_normalized)
        results.append((value, grad(value.square().sum(), logprobs)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_sequence_log_probabilities_name_the_argument_that_does_not_fit():
    with pytest.raises(ValueError, match=r"logprobs has shape \(2, 3\), but mask has \(2, 4\)"):
        sequence_logprobs(torch.zeros(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="logprobs has NaN or infinite"):
        sequence_logprobs(torch.full((2, 3), torch.nan), torch.ones(2, 3))


# DPO and IPO


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@few
@given(seed=seeds, beta=st.floats(1e-3, 10))
def test_dpo_at_the_reference_is_log_2_a_pair(label_smoothing, seed, beta):
    chosen, rejected, _, _ = random_pairs(seed, count=7)
    term = dpo_loss(chosen, rejected, chosen, rejected, beta=beta, label_smoothing=label_smoothing)
    assert term.count == 7
    torch.testing.assert_close(term.sum, torch.tensor(7 * math.log(2), dtype=torch.float64), rtol=0, atol=1e-12)


@few
@given(seed=seeds, beta=st.floats(1e-2, 2), label_smoothing=st.floats(0, 0.49))
def test_dpo_and_its_gradient_equal_the_closed_form_with_smoothed_labels(seed, beta, label_smoothing):
    pairs = random_pairs(seed)
    chosen, rejected, ref_chosen, ref_rejected = [x.detach() for x in pairs]
    h = beta * (chosen - ref_chosen - rejected + ref_rejected)
    expected = (torch.log1p(torch.exp(-h.abs())) + (-h).clamp(min=0) + label_smoothing * h).sum()
    term = dpo_loss(*pairs, beta=beta, label_smoothing=label_smoothing)
    torch.testing.assert_close(term.sum, expected, rtol=1e-12, atol=1e-12)
    slope = -beta * (torch.sigmoid(-h) - label_smoothing)
    for found, sign in zip(grad(term.sum, pairs[:2]), (1, -1), strict=True):
        torch.testing.assert_close(found, sign * slope, rtol=1e-10, atol=1e-12)


@few
@given(seed=seeds, beta=st.floats(1e-2, 2))
def test_ipo_and_its_gradient_equal_the_closed_form(seed, beta):
    pairs = random_pairs(seed)
    chosen, rejected, ref_chosen, ref_rejected = [x.detach() for x in pairs]
    distance = chosen - ref_chosen - rejected + ref_rejected - 0.5 / beta
    term = ipo_loss(*pairs, beta=beta)
    assert term.count == 5
    torch.testing.assert_close(term.sum, distance.square().sum(), rtol=1e-12, atol=1e-12)
    for found, sign in zip(grad(term.sum, pairs[:2]), (1, -1), strict=True):
        torch.testing.assert_close(found, 2 * sign * distance, rtol=1e-12, atol=1e-12)


def test_ipo_is_zero_with_gradient_zero_at_a_margin_of_half_over_beta():
    chosen = torch.tensor([-7.5, 2.5], dtype=torch.float64, requires_grad=True)
    term = ipo_loss(chosen, torch.zeros(2), torch.tensor([-10.0, 0.0]), torch.zeros(2), beta=0.2)
    assert (term.sum.item(), grad(term.sum, chosen)[0].tolist()) == (0.0, [0.0, 0.0])


@every_pair_loss
def test_pair_losses_agree_with_finite_differences(loss):
    pairs = random_pairs(3, count=3)
    assert gradcheck(lambda w, l_: loss(w, l_, *pairs[2:], beta=0.3).mean(), pairs[:2])


@every_pair_loss
@few
@given(seed=seeds)
def test_a_shift_that_depends_on_the_prompt_alone_changes_nothing(loss, seed):
    pairs, shift, ref_shift = random_pairs(seed), normal(seed + 1, 5), normal(seed + 2, 5)
    moved = [pairs[0] + shift, pairs[1] + shift, pairs[2] + ref_shift, pairs[3] + ref_shift]
    expected, found = loss(*pairs, beta=0.3).mean(), loss(*moved, beta=0.3).mean()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@few
@given(seed=seeds)
def test_exchanging_chosen_and_rejected_negates_the_margin(seed):
    w, l_, ref_w, ref_l = random_pairs(seed, count=1)
    beta = 0.3
    margin = preference_metrics(w, l_, ref_w, ref_l, beta=beta)["reward_margin"].sum
    exchanged = preference_metrics(l_, w, ref_l, ref_w, beta=beta)["reward_margin"].sum
    assert exchanged == -margin
    # log sigmoid(h) - log sigmoid(-h) = h
    difference = dpo_loss(l_, w, ref_l, ref_w, beta=beta).sum - dpo_loss(w, l_, ref_w, ref_l, beta=beta).sum
    torch.testing.assert_close(difference.detach(), margin, rtol=1e-10, atol=1e-12)


def test_the_reference_gets_no_gradient():
    pairs = [x.detach().requires_grad_() for x in random_pairs(4)]
    for loss in PAIR_LOSSES.values():
        gradients = grad(loss(*pairs, beta=0.3).sum, pairs, allow_unused=True)
        assert gradients[2:] == (None, None)


def test_dpo_neither_overflows_nor_vanishes_at_extreme_margins():
    margins = torch.tensor([-1e6, 1e6], requires_grad=True)
    zeros = torch.zeros(2)
    term = dpo_loss(margins, zeros, zeros, zeros, beta=1.0)
    assert (term.sum.item(), grad(term.sum, margins)[0].tolist()) == (1e6, [-1.0, 0.0])


@every_pair_loss
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e300])
def test_a_padding_pair_contributes_nothing_whatever_it_holds(loss, garbage):
    pairs = random_pairs(5, count=4)
    mask = torch.tensor([1, 0, 1, 0])
    filled = [torch.where(mask == 1, x.detach(), garbage).requires_grad_() for x in pairs]
    expected = loss(*[x[::2] for x in pairs], beta=0.3)
    found = loss(*filled, beta=0.3, mask=mask)
    assert found.count == 2
    assert torch.equal(found.sum, expected.sum)
    for x, y in zip(grad(expected.sum, pairs[:2]), grad(found.sum, filled[:2]), strict=True):
        assert torch.equal(x, y)


@every_pair_loss
def test_an_empty_micro_batch_and_one_of_padding_have_mean_zero_and_gradient_zero(loss):
    for count, mask in ((0, None), (0, torch.ones(0)), (3, torch.zeros(3))):
        pairs = [torch.full((count,), torch.nan, requires_grad=True) for _ in range(4)]
        term = loss(*pairs, beta=0.3, mask=mask)
        assert (term.mean().item(), int(term.count)) == (0.0, 0)
        assert torch.equal(grad(term.mean(), pairs[0])[0], torch.zeros(count))


@every_pair_loss
@pytest.mark.parametrize("name", PAIR_NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_an_error_that_names_the_argument(loss, name, bad):
    pairs = {**dict.fromkeys(PAIR_NAMES, torch.zeros(3)), name: torch.tensor([0.0, bad, 0.0])}
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite"):
        loss(**pairs, beta=0.3)
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite"):
        preference_metrics(**pairs, beta=0.3)


@every_pair_loss
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ref_rejected": torch.zeros(2)}, r"ref_rejected has shape \(2,\), but policy_chosen has \(3,\)"),
        ({"policy_rejected": torch.zeros(())}, r"policy_rejected has shape \(\), but policy_chosen"),
        ({"policy_chosen": torch.zeros(3, 4)}, r"policy_chosen has shape \(3, 4\), expected one dimension"),
        ({"mask": torch.ones(2)}, r"mask has shape \(2,\), expected \(3,\)"),
        ({"mask": torch.ones(3) * 0.5}, "mask has values other than 0 and 1"),
        ({"beta": 0.0}, "beta is 0.0, expected a finite number above 0"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"beta": math.inf}, "beta is inf"),
    ],
)
def test_arguments_that_do_not_fit_are_named(loss, changes, message):
    arguments = {**dict.fromkeys(PAIR_NAMES, torch.zeros(3)), "beta": 0.1, **changes}
    for function in (loss, preference_metrics):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


@pytest.mark.parametrize("label_smoothing", [-0.1, 0.5, math.nan])
def test_label_smoothing_out_of_range_is_an_error(label_smoothing):
    with pytest.raises(ValueError, match="label_smoothing is"):
        dpo_loss(*random_pairs(0), beta=0.1, label_smoothing=label_smoothing)


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


def test_the_coefficient_replaces_alpha_beta_and_the_default_is_the_papers(random_batch):
    pairs, batch = random_pairs(0), random_batch(0)
    bare = exploration_term(batch.logprobs, batch.old, batch.mask, reduction="seq-sum").sum
    for config, weight in (
        (DPOLossConfig(beta=0.5, exploration_coefficient=0.3), 0.3),
        (DPOLossConfig(beta=0.5), 1e-3 * 0.5),
    ):
        assert torch.equal(ed_idpo(pairs, batch, config)[1].sum, bare * weight)


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


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_padding_of_pairs_and_samples_changes_no_bit_of_the_ed_idpo_loss(random_batch, garbage):
    pairs, batch, config = random_pairs(7), random_batch(7), DPOLossConfig(alpha=3.0, length_normalized=True)
    pair_mask = torch.tensor([1, 1, 0, 1, 0])
    results = []
    for filler in (-1.0, garbage):
        filled = [torch.where(pair_mask == 1, x.detach(), filler).requires_grad_() for x in pairs]
        samples = (batch.logprobs.detach(), batch.old)
        sampled = [torch.where(batch.mask == 1, x, filler).requires_grad_() for x in samples]
        terms = ed_idpo_loss(*filled, *sampled, batch.mask, config, pair_mask=pair_mask)
        metrics = [term.mean() for term in terms[2].values()]
        results.append([total_of(terms), *grad(total_of(terms), [*filled[:2], sampled[0]]), *metrics])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


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


def test_micro_batches_without_pairs_or_without_samples_contribute_zero(random_batch):
    batch, config = random_batch(9), DPOLossConfig(alpha=3.0)
    preference, exploration, _ = ed_idpo([torch.zeros(0)] * 4, batch, config)
    assert (preference.mean().item(), int(preference.count)) == (0.0, 0)
    assert exploration.count > 0
    empty = SimpleNamespace(logprobs=torch.zeros(0, 3), old=torch.zeros(0, 3), mask=torch.zeros(0, 3))
    preference, exploration, metrics = ed_idpo(random_pairs(9), empty, config)
    assert preference.count == 5
    assert (exploration.mean().item(), int(exploration.count)) == (0.0, 0)
    assert metrics.keys() == ed_idpo(random_pairs(9), batch, config)[2].keys()


def test_samples_that_are_all_padding_are_an_error():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="mask is empty"):
        ed_idpo(random_pairs(9), SimpleNamespace(logprobs=zeros, old=zeros, mask=zeros), DPOLossConfig())


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 0.7])
def test_a_chosen_response_alone_settles_where_beta_margin_is_log_of_1_minus_alpha_over_alpha(alpha):
    config = DPOLossConfig(alpha=alpha, beta=0.3)
    logprob = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    zeros, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, 1)

    def loss() -> torch.Tensor:
        return total_of(ed_idpo_loss(logprob[0], zeros, zeros, zeros, logprob, zeros[None], one, config))

    optimizer = torch.optim.LBFGS([logprob], max_iter=200, tolerance_grad=1e-14, tolerance_change=0,
                                  line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    assert 0.3 * logprob.item() == pytest.approx(math.log((1 - alpha) / alpha), abs=1e-6)


def test_lowering_chosen_and_rejected_together_lowers_the_sum_without_bound_unless_floored():
    def total(shift: float, floor: float | None) -> float:
        both = torch.full((1,), -shift, dtype=torch.float64)
        samples = torch.full((2, 1), -shift, dtype=torch.float64)  # y_w and y_l themselves
        zeros, config = torch.zeros(1).double(), DPOLossConfig(alpha=0.1, beta=0.5, log_ratio_floor=floor)
        terms = ed_idpo_loss(both, both, zeros, zeros, samples, torch.zeros(2, 1), torch.ones(2, 1), config)
        return total_of(terms).item()

    for shift in (1.0, 1e3, 1e6):
        assert total(shift, None) == pytest.approx(math.log(2) - 0.05 * shift)
    assert total(1e6, -5.0) == pytest.approx(math.log(2) - 0.05 * 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pair_mask": torch.ones(4)}, r"pair_mask has shape \(4,\), expected \(3,\)"),
        ({"pair_mask": torch.full((3,), 2.0)}, "pair_mask has values other than 0 and 1"),
        ({"ref_chosen": torch.zeros(2)}, "ref_chosen has shape"),
        ({"policy_rejected": torch.tensor([0, torch.nan, 0])}, "policy_rejected has NaN or infinite"),
        ({"sample_mask": torch.ones(2, 5)}, r"sample_mask has shape \(2, 5\), expected \(2, 4\)"),
        ({"sample_mask": torch.full((2, 4), 0.5)}, "sample_mask has values other than 0 and 1"),
        ({"sample_old_logprobs": torch.zeros(2, 5)}, r"sample_old_logprobs has shape \(2, 5\)"),
        ({"sample_old_logprobs": torch.full((2, 4), -torch.inf)}, "sample_old_logprobs has NaN or infinite"),
        ({"sample_logprobs": torch.full((2, 4), torch.nan)}, "sample_logprobs has NaN or infinite"),
        ({"sample_weights": torch.zeros(3)}, r"weights has shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_ed_idpo_names_the_argument_that_does_not_fit_even_with_alpha_zero(alpha, changes, message):
    arguments = {
        **dict.fromkeys(PAIR_NAMES, torch.zeros(3)),
        "sample_logprobs": torch.zeros(2, 4),
        "sample_old_logprobs": torch.zeros(2, 4),
        "sample_mask": torch.ones(2, 4),
        "config": DPOLossConfig(alpha=alpha),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        ed_idpo_loss(**arguments)


# XPO, SELM, VPO


def online_vpo(*arguments, **options):
    return vpo_loss(*arguments, setting="online", **options)


def offline_vpo(*arguments, **options):
    return vpo_loss(*arguments, setting="offline", **options)


def xpo(*arguments, **options):
    return xpo_loss(*arguments[:5], **options)


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
def test_the_bias_is_its_coefficient_times_the_samples_log_ratio_beside_the_dpo_term(loss, factor, seed):
    pairs, samples, ref = random_pairs(seed), normal(seed + 1, 3).requires_grad_(), normal(seed + 2, 3)
    preference, bias = loss(*pairs, samples, ref, alpha=0.4, beta=0.25)
    base = dpo_loss(*pairs, beta=0.25)
    assert torch.equal(preference.sum, base.sum) and preference.count == 5 and bias.count == 3
    values = samples if loss is xpo else samples - ref
    torch.testing.assert_close(bias.sum, factor * values.sum(), rtol=1e-12, atol=1e-12)
    gradient = grad(total_of((preference, bias)), samples)[0]
    torch.testing.assert_close(gradient, torch.full_like(gradient, factor / 3), rtol=1e-12, atol=0)


@every_bias
def test_without_alpha_the_bias_is_dpo_to_the_last_bit(loss, factor):
    pairs, samples = random_pairs(1), normal(2, 3).requires_grad_()
    preference, bias = loss(*pairs, samples, samples.detach(), alpha=0.0, beta=0.25)
    assert (bias.sum.item(), bias.sum.requires_grad, int(bias.count)) == (0.0, False, 3)
    assert torch.equal(total_of((preference, bias)), dpo_loss(*pairs, beta=0.25).mean())


@every_bias
def test_minimising_lowers_the_samples_likelihood_except_for_offline_vpo_which_raises_it(loss, factor):
    """A softmax policy over 4 answers; pairs compare 0 with 1, and the samples are answers 2 and 3."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    ref = torch.full((4,), 0.25, dtype=torch.float64).log()
    optimizer = torch.optim.SGD([logits], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        p = logits.log_softmax(0)
        total_of(loss(p[:1], p[1:2], ref[:1], ref[1:2], p[2:], ref[2:], alpha=4.0, beta=0.25)).backward()
        optimizer.step()
    found = logits.detach().log_softmax(0)
    assert found[0] > found[1]
    assert ((found[2:] < ref[2:]) == (factor > 0)).all()


@every_bias
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_padding_samples_contribute_nothing_whatever_they_hold(loss, factor, garbage):
    pairs, mask = random_pairs(3), torch.tensor([1, 0, 1])
    options = {"calibration_mask" if loss in (online_vpo, offline_vpo) else "sample_mask": mask}
    samples, ref = [torch.where(mask == 1, normal(seed, 3), garbage).requires_grad_() for seed in (1, 2)]
    preference, bias = loss(*pairs, samples, ref, alpha=0.4, beta=0.25, **options)
    expected = loss(*pairs, samples[::2], ref[::2], alpha=0.4, beta=0.25)[1]
    assert torch.equal(bias.sum, expected.sum) and bias.count == 2
    gradients = grad(bias.sum, [samples, ref], allow_unused=True)
    torch.testing.assert_close(gradients[0], factor * mask.double(), rtol=1e-12, atol=0)
    assert gradients[1] is None


@every_bias
def test_pairs_or_samples_may_be_missing_from_a_micro_batch(loss, factor):
    empty = torch.zeros(0)
    preference, bias = loss(*[empty] * 4, normal(1, 3), normal(2, 3), alpha=0.4, beta=0.25)
    assert (preference.mean().item(), int(preference.count), int(bias.count)) == (0.0, 0, 3)
    preference, bias = loss(*random_pairs(1), empty, empty, alpha=0.4, beta=0.25)
    assert (bias.mean().item(), int(bias.count), int(preference.count)) == (0.0, 0, 5)


@pytest.mark.parametrize(
    ("loss", "names", "mask_name"),
    [
        (xpo_loss, ("policy_on_reference_samples",), "sample_mask"),
        (selm_loss, ("policy_samples", "ref_samples"), "sample_mask"),
        (vpo_loss, ("policy_calibration", "ref_calibration"), "calibration_mask"),
    ],
)
def test_biased_losses_name_the_argument_that_does_not_fit(loss, names, mask_name):
    good = {**dict.fromkeys(PAIR_NAMES, torch.zeros(3)), **dict.fromkeys(names, torch.zeros(4))}
    good |= {"alpha": 0.1, "beta": 0.1}
    assert isinstance(loss(**good)[1], LossTerm)
    cases = [({name: torch.full((4,), torch.nan)}, f"{name} has NaN or infinite") for name in names]
    cases += [({names[-1]: torch.zeros(5, 2)}, f"{names[-1]} has shape")]
    cases += [
        ({mask_name: torch.ones(3)}, rf"{mask_name} has shape \(3,\), expected \(4,\)"),
        ({mask_name: torch.full((4,), 2)}, f"{mask_name} has values other than 0 and 1"),
        ({"mask": torch.ones(4)}, r"mask has shape \(4,\), expected \(3,\)"),
        ({"policy_rejected": torch.zeros(4)}, "policy_rejected has shape"),
        ({"alpha": -0.1}, "alpha is -0.1, expected a finite number of at least 0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": math.inf}, "alpha is inf"),
        ({"beta": 0.0}, "beta is 0.0"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            loss(**{**good, **changes})


def test_vpo_refuses_an_unknown_setting():
    with pytest.raises(ValueError, match="setting is 'both', expected online or offline"):
        vpo_loss(*random_pairs(0), torch.zeros(2), torch.zeros(2), beta=0.1, alpha=0.1, setting="both")


def test_the_vpo_bias_is_the_value_of_the_best_policy_for_a_calibrated_reward():
    """J*(r) = beta log Z where E_cal[r] = 0; online minimises -alpha J*, offline +alpha J*."""
    beta, alpha = 0.7, 0.3
    ref, calibration = normal(1, 4).log_softmax(0), normal(2, 4).softmax(0)
    reward = normal(3, 4)
    reward = reward - (calibration * reward).sum()
    log_z = (ref + reward / beta).logsumexp(0)
    policy = ref + reward / beta - log_z
    # pi_cal's expectation, as samples in proportion to its probabilities: one sample an answer, times its probability.
    zeros = torch.zeros(1, dtype=torch.float64)
    for setting, sign in (("online", -1), ("offline", 1)):
        values = [
            vpo_loss(zeros, zeros, zeros, zeros, policy[i : i + 1], ref[i : i + 1], beta=beta, alpha=alpha,
                     setting=setting)[1].mean()
            for i in range(4)
        ]
        bias = (calibration * torch.stack(values)).sum()
        torch.testing.assert_close(bias, sign * alpha * beta * log_z, rtol=0, atol=1e-12)
