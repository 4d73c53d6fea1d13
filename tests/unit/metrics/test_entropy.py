import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import entropy_from_logits


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0, 50))
def test_entropy_agrees_with_torchs_categorical_and_lies_in_zero_to_log_v(seed, scale):
    logits = scale * torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(seed))
    entropies = entropy_from_logits(logits)
    expected = torch.distributions.Categorical(logits=logits.double()).entropy().float()
    torch.testing.assert_close(entropies, expected, rtol=1e-5, atol=1e-6)
    assert (entropies >= 0).all() and (entropies <= math.log(11) + 1e-6).all()


def test_impossible_outcomes_leave_the_entropy_of_the_others():
    logits = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert torch.isfinite(logits.grad).all()


def test_half_precision_logits_are_computed_in_single_precision():
    logits = torch.randn(5, 1000).bfloat16()
    assert torch.equal(entropy_from_logits(logits), entropy_from_logits(logits.float()))
    assert entropy_from_logits(logits).dtype == torch.float32
