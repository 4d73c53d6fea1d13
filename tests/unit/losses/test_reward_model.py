import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck
from torch.nn.functional import cross_entropy

from nemo_edo.losses import LossTerm, bradley_terry_loss, dpo_loss, ranking_nce_loss

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
WEIGHTINGS = ("softmax", "uniform")
every_weighting = pytest.mark.parametrize("weighting", WEIGHTINGS)


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()


# Bradley-Terry


@few
@given(seed=seeds, margin=st.floats(-3, 3))
def test_bradley_terry_and_its_gradient_equal_the_closed_form(seed, margin):
    chosen, rejected = normal(seed, 5), normal(seed + 1, 5)
    term = bradley_terry_loss(chosen, rejected, margin=margin)
    difference = (chosen - rejected - margin).detach()
    torch.testing.assert_close(term.sum, torch.log1p(torch.exp(-difference)).sum(), rtol=1e-12, atol=1e-12)
    assert term.count == 5
    for found, sign in zip(grad(term.sum, [chosen, rejected]), (-1, 1), strict=True):
        torch.testing.assert_close(found, sign * torch.sigmoid(-difference), rtol=1e-12, atol=1e-12)


def test_equal_scores_cost_log_2_and_a_margin_moves_the_comparison():
    scores = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert bradley_terry_loss(scores, scores).mean().item() == pytest.approx(math.log(2), abs=1e-15)
    margin = torch.tensor([0.5, 3.0], dtype=torch.float64, requires_grad=True)
    found = bradley_terry_loss(scores + margin.detach(), scores, margin=margin)
    assert found.mean().item() == pytest.approx(math.log(2), abs=1e-15)
    assert not found.sum.requires_grad  # the margin is a constant


def test_a_number_and_a_tensor_of_it_are_the_same_margin_in_double_precision():
    chosen, rejected = normal(1, 4), normal(2, 4)
    expected = bradley_terry_loss(chosen, rejected, margin=torch.full((4,), 0.1, dtype=torch.float64))
    assert torch.equal(bradley_terry_loss(chosen, rejected, margin=0.1).sum, expected.sum)


def test_dpo_is_bradley_terry_on_implicit_rewards():
    rows = [normal(seed, 4) for seed in range(4)]
    chosen, rejected = 0.3 * (rows[0] - rows[2]), 0.3 * (rows[1] - rows[3])
    torch.testing.assert_close(
        dpo_loss(*rows, beta=0.3).mean(), bradley_terry_loss(chosen, rejected).mean(), rtol=1e-12, atol=1e-12
    )


def test_bradley_terry_is_stable_at_large_scores():
    chosen = torch.tensor([1e8, -1e8], requires_grad=True)
    term = bradley_terry_loss(chosen, -chosen.detach())
    assert (term.sum.item(), grad(term.sum, chosen)[0].tolist()) == (2e8, [0.0, -1.0])


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_a_padding_pair_contributes_nothing_whatever_it_holds(garbage):
    mask = torch.tensor([True, False, True])
    scores = [torch.where(mask, normal(seed, 3).detach(), garbage).requires_grad_() for seed in range(3)]
    term = bradley_terry_loss(*scores[:2], margin=scores[2], mask=mask)
    expected = bradley_terry_loss(scores[0][::2], scores[1][::2], margin=scores[2][::2])
    assert torch.equal(term.sum, expected.sum) and term.count == 2
    for found, row in zip(grad(term.sum, scores[:2]), grad(expected.sum, scores[:2]), strict=True):
        assert torch.equal(found, row) and found[1] == 0


def test_no_pairs_have_mean_zero_and_gradient_zero():
    for count, mask in ((0, None), (2, torch.zeros(2))):
        scores = torch.full((count,), torch.nan, requires_grad=True)
        term = bradley_terry_loss(scores, scores, mask=mask)
        assert (term.mean().item(), int(term.count)) == (0.0, 0)
        assert torch.equal(grad(term.mean(), scores)[0], torch.zeros(count))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen_scores": torch.zeros(3, 1)}, r"chosen_scores has shape \(3, 1\), expected one dimension"),
        ({"rejected_scores": torch.zeros(2)}, r"rejected_scores has shape \(2,\), but chosen_scores has \(3,\)"),
        ({"margin": torch.zeros(2)}, r"margin has shape \(2,\), but chosen_scores has \(3,\)"),
        ({"mask": torch.ones(3, 1)}, r"mask has shape \(3, 1\), expected \(3,\)"),
        ({"mask": torch.tensor([1, 2, 1])}, "mask has values other than 0 and 1"),
        ({"chosen_scores": torch.tensor([0, torch.nan, 0])}, "chosen_scores has NaN or infinite"),
        ({"rejected_scores": torch.tensor([0, -torch.inf, 0])}, "rejected_scores has NaN or infinite"),
        ({"margin": math.nan}, "margin has NaN or infinite"),
        ({"margin": torch.tensor([0, torch.inf, 0])}, "margin has NaN or infinite"),
    ],
)
def test_bradley_terry_names_the_argument_that_does_not_fit(changes, message):
    arguments = {"chosen_scores": torch.zeros(3), "rejected_scores": torch.zeros(3), **changes}
    with pytest.raises(ValueError, match=message):
        bradley_terry_loss(**arguments)


# Ranking NCE


@few
@given(seed=seeds, negatives=st.integers(1, 6))
def test_softmax_weighting_is_cross_entropy_with_the_positive_as_label(seed, negatives):
    positive, negative = normal(seed, 4), normal(seed + 1, 4, negatives)
    expected = cross_entropy(torch.cat([positive[:, None], negative], dim=1), torch.zeros(4).long(), reduction="sum")
    term = ranking_nce_loss(positive, negative)
    assert term.count == 4
    torch.testing.assert_close(term.sum, expected, rtol=1e-12, atol=1e-12)
    for x, y in zip(grad(term.sum, [positive, negative]), grad(expected, [positive, negative]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("negatives", [1, 3, 9])
def test_negatives_that_score_as_the_positive_cost_log_k_plus_1_or_nothing_when_weighted_uniformly(negatives):
    positive = torch.tensor([2.5, -1.0], dtype=torch.float64)
    negative = positive[:, None].expand(2, negatives)
    assert ranking_nce_loss(positive, negative).mean().item() == pytest.approx(math.log(negatives + 1), abs=1e-14)
    assert ranking_nce_loss(positive, negative, weighting="uniform").mean().item() == 0


@few
@given(seed=seeds, l2=st.floats(0, 2))
def test_uniform_weighting_pushes_every_negative_down_alike_and_as_much_in_all_as_the_positive_up(seed, l2):
    positive, negative = normal(seed, 4), normal(seed + 1, 4, 5)
    term = ranking_nce_loss(positive, negative, weighting="uniform", l2=l2)
    penalty = l2 * (positive.square() + negative.square().mean(dim=1))
    torch.testing.assert_close(term.sum, (negative.mean(dim=1) - positive + penalty).sum(), rtol=1e-12, atol=1e-12)
    on_positive, on_negative = grad(term.sum, [positive, negative])
    torch.testing.assert_close(on_positive, (2 * l2 * positive - 1).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(on_negative, ((2 * l2 * negative + 1) / 5).detach(), rtol=1e-12, atol=1e-12)


@few
@given(seed=seeds, l2=st.floats(1e-3, 2))
def test_l2_adds_the_square_of_the_positive_and_the_mean_square_of_the_negatives(seed, l2):
    positive, negative = normal(seed, 4), normal(seed + 1, 4, 3)
    added = ranking_nce_loss(positive, negative, l2=l2).sum - ranking_nce_loss(positive, negative).sum
    expected = l2 * (positive.square() + negative.square().mean(dim=1)).sum()
    torch.testing.assert_close(added, expected, rtol=1e-10, atol=1e-10)


@every_weighting
def test_the_gradient_agrees_with_finite_differences(weighting):
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    assert gradcheck(
        lambda p, n: ranking_nce_loss(p, n, l2=0.3, negative_mask=mask, weighting=weighting).mean(),
        (normal(1, 3), normal(2, 3, 3)),
    )


@every_weighting
@few
@given(seed=seeds)
def test_without_l2_a_shift_of_a_questions_scores_changes_nothing(weighting, seed):
    positive, negative, shift = normal(seed, 4), normal(seed + 1, 4, 3), normal(seed + 2, 4)
    expected = ranking_nce_loss(positive, negative, weighting=weighting).sum
    found = ranking_nce_loss(positive + shift, negative + shift[:, None], weighting=weighting).sum
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_one_negative_with_softmax_weighting_is_bradley_terry():
    positive, negative = normal(1, 4), normal(2, 4)
    expected = bradley_terry_loss(positive, negative)
    assert torch.equal(ranking_nce_loss(positive, negative[:, None]).sum, expected.sum)


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (1e6, 0.0),
        (-1e6, 1e6 + math.log(2)),
        (40.0, 2 * math.exp(-40.0)),
        (-21.0, 21 + math.log(2) + math.log1p(math.exp(-21) / 2)),
    ],
)
def test_softmax_weighting_is_stable_and_exact_at_large_gaps(gap, expected):
    positive = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    negative = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    term = ranking_nce_loss(positive, negative)
    assert term.sum.item() == pytest.approx(expected, rel=1e-12, abs=0)
    assert all(x.isfinite().all() for x in grad(term.sum, [positive, negative]))


@every_weighting
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_ragged_negatives_equal_questions_taken_one_by_one(weighting, garbage):
    counts = [3, 1, 0, 2]
    mask = (torch.arange(3) < torch.tensor(counts)[:, None]).double()
    positive = torch.where(mask.any(dim=1), normal(1, 4).detach(), garbage).requires_grad_()
    negative = torch.where(mask == 1, normal(2, 4, 3).detach(), garbage).requires_grad_()
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


def test_no_step_of_the_backward_pass_is_nan_for_a_question_without_negatives():
    positive, negative = normal(1, 2), normal(2, 2, 3)
    with torch.autograd.set_detect_anomaly(True):
        term = ranking_nce_loss(positive, negative, negative_mask=torch.tensor([[1, 0, 1], [0, 0, 0]]))
        gradients = grad(term.sum, [positive, negative])
    assert all(x[0].abs().sum() > 0 and not x[1].any() for x in gradients)


@every_weighting
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_no_questions_or_no_negatives_have_mean_zero_and_gradient_zero(weighting, shape):
    positive, negative = torch.ones(shape[0], requires_grad=True), torch.ones(shape, requires_grad=True)
    mask = torch.zeros(shape)
    term = ranking_nce_loss(positive, negative, l2=0.1, negative_mask=mask, weighting=weighting)
    assert (term.mean().item(), int(term.count)) == (0.0, 0)
    for gradient in grad(term.mean(), [positive, negative]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@every_weighting
@few
@given(seed=seeds, cut=st.integers(0, 4))
def test_any_split_of_the_questions_gives_the_gradient_of_the_whole(weighting, seed, cut):
    positive, negative = normal(seed, 4), normal(seed + 1, 4, 3)
    whole = ranking_nce_loss(positive, negative, l2=0.1, weighting=weighting)
    parts = [
        ranking_nce_loss(positive[rows], negative[rows], l2=0.1, weighting=weighting)
        for rows in (slice(0, cut), slice(cut, None))
    ]
    expected = grad(whole.mean(), [positive, negative])
    share = (parts[0].sum + parts[1].sum) / whole.count
    for found, x in zip(grad(share, [positive, negative]), expected, strict=True):
        torch.testing.assert_close(found, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weighting": "mean"}, "weighting is 'mean', expected softmax or uniform"),
        ({"l2": -0.1}, "l2 is -0.1"),
        ({"l2": math.nan}, "l2 is nan"),
        ({"positive_scores": torch.zeros(3)}, r"positive_scores has shape \(3,\) and negative_scores \(2, 4\)"),
        ({"positive_scores": torch.zeros(2, 1)}, r"positive_scores has shape \(2, 1\)"),
        ({"negative_scores": torch.zeros(2)}, r"negative_scores \(2,\), expected \[Q\] and \[Q, K\]"),
        ({"negative_mask": torch.ones(2, 3)}, r"negative_mask has shape \(2, 3\), expected \(2, 4\)"),
        ({"negative_mask": torch.full((2, 4), 0.5)}, "negative_mask has values other than 0 and 1"),
        ({"positive_scores": torch.tensor([0, torch.inf])}, "positive_scores has NaN or infinite"),
        ({"negative_scores": torch.full((2, 4), torch.nan)}, "negative_scores has NaN or infinite"),
    ],
)
def test_ranking_nce_names_the_argument_that_does_not_fit(changes, message):
    arguments = {"positive_scores": torch.zeros(2), "negative_scores": torch.zeros(2, 4), **changes}
    with pytest.raises(ValueError, match=message):
        ranking_nce_loss(**arguments)
