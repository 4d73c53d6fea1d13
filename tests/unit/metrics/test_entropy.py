import math

import pytest
import torch

from nemo_edo.metrics import entropy_from_logits


def dense(logits, temperature=1.0):
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return -torch.where(log_p.isneginf(), 0.0, log_p.exp() * log_p).sum(dim=-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 4096])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_value_and_gradient_are_those_of_the_dense_formula(chunk, temperature):
    logits = 3 * torch.randn(4, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 1:] = -torch.inf
    logits[0, 1, 3] = -torch.inf
    weights = torch.arange(8.0, dtype=torch.float64).reshape(4, 2) - 3
    chunked, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (weights * entropy_from_logits(chunked, temperature=temperature, chunk=chunk)).sum().backward()
    expected = dense(reference.clamp(min=-1e4), temperature)
    (weights * expected).sum().backward()
    torch.testing.assert_close(entropy_from_logits(logits, temperature=temperature, chunk=chunk), expected.detach())
    torch.testing.assert_close(chunked.grad, reference.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(entropy_from_logits(chunked, temperature=temperature, chunk=chunk)[0, 0].detach(),
                       torch.tensor(0.0, dtype=torch.float64))


def test_bfloat16_logits_of_a_real_vocabulary_are_exact_to_a_millionth():
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[0.01], [1.0], [3.0], [10.0]])
    logits = (scales * torch.randn(4, 152_000, generator=generator)).bfloat16()
    entropies = entropy_from_logits(logits)
    torch.testing.assert_close(entropies.double(), dense(logits.double()), rtol=0, atol=1e-6)
    assert (entropies >= 0).all() and (entropies <= math.log(152_000) + 1e-6).all()


@pytest.mark.parametrize(("logits", "message"), [
    (torch.full((2, 3), -torch.inf), "logits hold nothing but -inf; 2 of 2 positions"),
    (torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), "logits hold NaN; 1 of 2 positions"),
    (torch.tensor([0.0, torch.inf]), r"logits hold \+inf; 1 of 1 positions"),
    (torch.zeros(2, 0), r"logits are torch.float32 of shape \(2, 0\)"), (torch.tensor(1.0), "logits are torch.float32"),
    (torch.zeros(2, 3, dtype=torch.long), "logits are torch.int64"),
])
def test_logits_without_a_distribution_are_errors(logits, message):
    with pytest.raises(ValueError, match=message):
        entropy_from_logits(logits)
