"""Rotary positions of our own attention against Megatron's."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig

from nemo_edo.megatron.cpu.self_attention import rotate, turns


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize(("length", "rows", "width"), [(1, 3, 64), (7, 3, 16), (7, 1, 16), (1, 1, 16)])
def test_rotation_and_its_gradient_are_megatrons(length: int, rows: int, width: int, scale: float):
    torch.manual_seed(0)
    half = torch.rand(length, 1, 1, width // 2) * 6
    angles = torch.cat([half, half], dim=-1)
    shape = (length, rows, 2, width)
    ours, theirs = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)
    )
    upstream, config = torch.randn(shape), TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1)
    rotated, expected = (
        rotate(ours, *turns(angles, scale, torch.float32)),
        apply_rotary_pos_emb(theirs, angles, config, mscale=scale),
    )
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-6)
    rotated.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
