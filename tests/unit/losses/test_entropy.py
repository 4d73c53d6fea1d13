import pytest
import torch

from nemo_edo.losses import entropy_bonus


def test_the_bonus_is_the_negative_entropy_so_that_minimising_it_raises_entropy():
    logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    for _ in range(300):
        entropies = torch.distributions.Categorical(logits=logits).entropy()[None]
        term = entropy_bonus(entropies, torch.ones(1, 1), reduction="token-mean")
        (gradient,) = torch.autograd.grad(term.mean(), logits)
        logits = (logits - gradient).detach().requires_grad_()
    assert term.mean().item() == pytest.approx(-torch.tensor(3.0).log().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("reduction", "mean"),
    [("seq-sum", -2.5), ("seq-mean-token-mean", -1.75), ("token-mean", -5 / 3), ("seq-mean-token-sum-norm", -0.25)],
)
def test_the_bonus_uses_the_reduction_of_the_loss_it_is_added_to(reduction, mean):
    entropies = torch.tensor([[1.0, 2.0], [2.0, torch.nan]])
    term = entropy_bonus(entropies, torch.tensor([[1.0, 1.0], [1.0, 0.0]]), reduction=reduction, norm_length=10)
    assert term.mean().item() == pytest.approx(mean)


def test_an_entropy_that_is_not_finite_at_a_valid_token_is_an_error():
    with pytest.raises(ValueError, match="^entropies_BT has NaN"):
        entropy_bonus(torch.tensor([[torch.nan]]), torch.ones(1, 1), reduction="token-mean")
