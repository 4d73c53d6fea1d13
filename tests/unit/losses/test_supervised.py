import pytest
import torch
from torch.nn import functional as F

from nemo_edo.losses import sft_loss


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


def test_a_log_probability_that_is_not_finite_at_a_valid_token_is_an_error():
    with pytest.raises(ValueError, match="^logprobs_BT has NaN or infinite"):
        sft_loss(torch.tensor([[-torch.inf]]), torch.ones(1, 1))
