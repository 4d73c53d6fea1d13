import pytest
import torch
from torch.nn import functional as F

from nemo_edo.losses.term import LossTerm, entropy_bonus, reduce_tokens, reduction_count, sft_loss

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(("reduction", "total", "count", "of_all_rows"), [
    ("seq-sum", 6 + 4, 2, 3), ("seq-mean-token-mean", 2 + 4, 2, 3), ("token-mean", 6 + 4, 4, 4),
    ("seq-mean-token-sum-norm", (6 + 4) / 8, 2, 3),
])
@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.long()], ids=lambda mask: str(mask.dtype))
def test_each_reduction_gives_the_sum_and_count_of_its_definition(reduction, total, count, of_all_rows, mask):
    bonus = entropy_bonus(VALUES, mask, reduction=reduction, norm_length=8)
    assert (bonus.sum.item(), int(bonus.count)) == (-total, count)
    for rows, expected in (("non-empty", count), ("all", of_all_rows)):
        term = reduce_tokens(VALUES, mask, reduction, 8, rows=rows)
        assert (term.sum.item(), int(term.count)) == (total, expected)
        assert int(reduction_count(mask, reduction, rows=rows)) == expected
    nothing = reduce_tokens(VALUES, torch.zeros_like(mask), reduction, 8, rows="all", on_empty="zero")
    assert (nothing.mean().item(), int(nothing.count)) == (0, 0 if reduction == "token-mean" else 3)


def test_terms_of_the_same_samples_are_scaled_and_added_and_others_refused():
    term = LossTerm(torch.tensor(3.0), 4)
    scaled, combined = term.scaled(2.0), term.plus(LossTerm(torch.tensor(10.0), 4), 0.5)
    assert (scaled.sum.item(), scaled.count, scaled.mean().item()) == (6.0, 4, 1.5)
    assert (combined.sum.item(), combined.count) == (8.0, 4)
    with pytest.raises(ValueError, match="4 and 5"):
        term.plus(LossTerm(torch.tensor(1.0), 5), 1.0)


@pytest.mark.parametrize(("total", "count", "mean", "slope"), [
    (3.0, 0, torch.inf, torch.inf),  # a sum over no samples that is not 0 is not hidden
    (0.0, 0, 0.0, 1.0), (0.0, 4, 0.0, 0.25), (3.0, 4, 0.75, 0.25),
])
def test_a_mean_is_the_sum_over_the_count_and_0_for_no_samples(total, count, mean, slope):
    x = torch.tensor(total, requires_grad=True)
    found = LossTerm(x, count).mean()
    assert (found.item(), torch.autograd.grad(found, x)[0].item()) == (mean, slope)


def test_a_mean_of_16_bits_is_over_the_exact_count():
    assert LossTerm(torch.tensor(7000.0, dtype=torch.float16), 70_000).mean().item() == pytest.approx(0.1, rel=1e-3)


def test_sft_loss_is_torchs_cross_entropy_over_the_tokens_that_count():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 4, 7, requires_grad=True), torch.randint(7, (3, 4))
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]).float()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(mask == 0, -100).flatten())
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    found = sft_loss(logprobs, mask)
    assert int(found.count) == 5
    torch.testing.assert_close(found.mean(), expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found.mean(), expected)))
