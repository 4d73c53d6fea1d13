"""Rotary positions of our own attention against Megatron's."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from nemo_edo.megatron.self_attention import rotate


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize(("length", "width"), [(1, 64), (7, 16)])
def test_rotation_and_its_gradient_are_megatrons(length: int, width: int, scale: float):
    torch.manual_seed(0)
    half = torch.rand(length, 1, 1, width // 2) * 6
    angles = torch.cat([half, half], dim=-1)
    ours, theirs = (torch.randn(length, 3, 2, width, generator=torch.Generator().manual_seed(1)).requires_grad_()
                    for _ in range(2))
    upstream = torch.randn(length, 3, 2, width)
    rotated, expected = rotate(ours, angles, scale), _apply_rotary_pos_emb_bshd(theirs, angles, mscale=scale)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-6)
    rotated.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


def test_rotation_keeps_the_type_of_what_it_rotates():
    angles = torch.rand(4, 1, 1, 8)
    assert rotate(torch.randn(4, 1, 1, 8, dtype=torch.bfloat16), angles).dtype == torch.bfloat16


def test_vectors_that_are_parts_of_a_larger_tensor_are_rotated_alike():
    """Queries and keys are slices of one product."""
    both = torch.randn(5, 2, 3, 32)
    angles = torch.rand(5, 1, 1, 16).repeat(1, 1, 1, 1)
    torch.testing.assert_close(rotate(both[..., 16:], angles), rotate(both[..., 16:].contiguous(), angles))
