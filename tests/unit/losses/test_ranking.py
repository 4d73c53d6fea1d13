import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad
from torch.nn.functional import cross_entropy

from nemo_edo.losses import LossTerm, ranking_nce_loss

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
WEIGHTINGS = ("softmax", "uniform")
every_weighting = pytest.mark.parametrize("weighting", WEIGHTINGS)


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()


@few
@given(seed=seeds, negatives=st.integers(1, 6), l2=st.floats(0, 2))
def test_softmax_weighting_is_cross_entropy_with_the_positive_as_label_and_the_penalty(seed, negatives, l2):
    positive, negative = normal(seed, 4), normal(seed + 1, 4, negatives)
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
    positive, negative = normal(seed, 4), normal(seed + 1, 4, 5)
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
