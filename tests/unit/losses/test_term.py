import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses.term import REDUCTIONS, LossTerm, reduce_tokens, reduction_count

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("reduction", "total", "count"),
    [
        ("seq-sum", 6 + 4, 2),
        ("seq-mean-token-mean", 2 + 4, 2),
        ("token-mean", 6 + 4, 4),
        ("seq-mean-token-sum-norm", (6 + 4) / 8, 2),
    ],
)
def test_each_reduction_gives_the_sum_and_count_of_its_definition(reduction, total, count):
    term = reduce_tokens(VALUES, MASK, reduction, norm_length=8)
    assert (term.sum.item(), int(term.count)) == (total, count)
    assert int(reduction_count(MASK, reduction)) == count


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_is_an_error(reduction, shape):
    for call in (
        lambda: reduce_tokens(torch.zeros(shape), torch.zeros(shape), reduction, norm_length=8),
        lambda: reduction_count(torch.zeros(shape), reduction),
    ):
        with pytest.raises(ValueError, match=rf"mask is empty: none of its \({shape[0]}, {shape[1]}\) entries is 1"):
            call()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_all_masked_sequence_contributes_nothing_and_divides_nothing_by_zero(reduction):
    values = torch.full((2, 3), torch.nan)
    values[0] = 2.0
    values.requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    both, alone = (
        reduce_tokens(values[:rows], mask[:rows], reduction, norm_length=8) for rows in (2, 1)
    )
    assert (both.sum, both.count) == (alone.sum, alone.count)
    both.mean().backward()
    assert torch.isfinite(values.grad).all() and not values.grad[1].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), garbage=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
def test_padding_content_changes_neither_value_nor_gradient(random_batch, reduction, seed, garbage):
    batch = random_batch(seed)
    results = []
    for filler in (0.0, garbage):
        values = torch.where(batch.mask == 1, batch.old, filler).requires_grad_()
        mean = reduce_tokens(values, batch.mask, reduction, norm_length=8).mean()
        mean.backward()
        results.append((mean, values.grad))
    (mean, grad), (mean_with_garbage, grad_with_garbage) = results
    assert torch.equal(mean, mean_with_garbage)
    assert torch.equal(grad, grad_with_garbage)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 6), max_size=4))
def test_parts_of_a_batch_add_up_to_the_whole(random_batch, reduction, seed, cuts):
    batch = random_batch(seed, sequences=6)
    whole = reduce_tokens(batch.old, batch.mask, reduction, norm_length=8)
    total = LossTerm(torch.zeros((), dtype=torch.float64), 0)
    edges = [0, *sorted(cuts), 6]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        if not batch.mask[start:end].any():
            continue  # padding alone is no micro-batch
        total = total + reduce_tokens(batch.old[start:end], batch.mask[start:end], reduction, norm_length=8)
    torch.testing.assert_close(total.sum, whole.sum, rtol=0, atol=1e-12)
    assert total.count == whole.count


def test_a_bool_mask_means_the_same_as_a_float_mask():
    for reduction in REDUCTIONS:
        expected = reduce_tokens(VALUES, MASK, reduction, norm_length=8)
        found = reduce_tokens(VALUES, MASK.bool(), reduction, norm_length=8)
        assert (found.sum, found.count) == (expected.sum, expected.count)


def test_scaled_multiplies_the_sum_and_keeps_the_count():
    term = LossTerm(torch.tensor(3.0), 4).scaled(2.0)
    assert (term.sum.item(), term.count, term.mean().item()) == (6.0, 4, 1.5)


def test_plus_adds_the_weighted_sum_over_the_same_samples():
    term = LossTerm(torch.tensor(3.0), 4).plus(LossTerm(torch.tensor(10.0), 4), 0.5)
    assert (term.sum.item(), term.count) == (8.0, 4)


def test_plus_refuses_terms_of_other_samples():
    with pytest.raises(ValueError, match="same samples.*4 and 5"):
        LossTerm(torch.tensor(3.0), 4).plus(LossTerm(torch.tensor(1.0), 5), 1.0)


def test_a_sum_over_no_samples_that_is_not_zero_is_not_hidden():
    assert LossTerm(torch.tensor(3.0), 0).mean().isinf()


def test_a_count_beyond_float32_integers_stays_exact():
    count = reduction_count(torch.ones(1, 3), "token-mean") + 2**24
    assert int(count) == 2**24 + 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_at_a_valid_token_is_an_error_that_names_the_argument(bad):
    values = VALUES.clone()
    values[1, 0] = bad
    with pytest.raises(ValueError, match="values_BT has NaN or infinite"):
        reduce_tokens(values, MASK, "token-mean")


@pytest.mark.parametrize(
    ("values", "mask", "reduction", "norm_length", "message"),
    [
        (VALUES[:, :2], MASK, "token-mean", None, r"values_BT has shape \(3, 2\), but mask has \(3, 3\)"),
        (VALUES[0], MASK[0], "token-mean", None, r"mask has shape \(3,\), expected \[B, T\]"),
        (VALUES, MASK * 0.5, "token-mean", None, "mask has values other than 0 and 1"),
        (VALUES, MASK * torch.nan, "token-mean", None, "mask has values other than 0 and 1"),
        (VALUES, MASK, "mean", None, "reduction is 'mean', expected one of seq-sum"),
        (VALUES, MASK, "seq-mean-token-sum-norm", None, "norm_length is None"),
        (VALUES, MASK, "seq-mean-token-sum-norm", 0, "norm_length is 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(values, mask, reduction, norm_length, message):
    with pytest.raises(ValueError, match=message):
        reduce_tokens(values, mask, reduction, norm_length)
