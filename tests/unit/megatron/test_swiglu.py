import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from nemo_edo.megatron import swiglu as module
from nemo_edo.megatron.swiglu import SwiGLUMLP, is_swiglu, swiglu


@pytest.mark.parametrize("block_bytes", [1, 7 * 6 * 8, 1 << 20])
@pytest.mark.parametrize("shape", [(6,), (9, 6), (5, 4, 6)])
def test_the_gradient_is_that_of_finite_differences_whatever_the_blocks(monkeypatch, shape, block_bytes):
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(swiglu, torch.randn(shape, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_values_and_gradients_are_those_of_torchs_silu_and_product(dtype, tolerance):
    torch.manual_seed(0)
    both, upstream = (2 * torch.randn(700, width).to(dtype) for width in (1024, 512))
    ours, theirs = both.clone().requires_grad_(), both.double().requires_grad_()
    gate, up = theirs.chunk(2, dim=-1)
    results = [swiglu(ours), F.silu(gate) * up]
    for result in results:
        result.backward(upstream.to(result.dtype))
    for one, other in (results, (ours.grad, theirs.grad)):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_an_input_with_gaps_is_computed_alike():
    wide = torch.randn(5, 3, 16)
    torch.testing.assert_close(swiglu(wide[:, ::2, 4:12]), swiglu(wide[:, ::2, 4:12].contiguous()), rtol=0, atol=0)


PLAIN = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "bias_activation_fusion": False,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"activation_func": F.gelu}, False),
        ({"gated_linear_unit": False}, False),
        ({"add_bias_linear": True}, False),
        ({"activation_func_clamp_value": 7.0}, False),
        ({"glu_linear_offset": 1.0}, False),
    ],
)
def test_it_is_for_the_plain_gated_silu_alone(changes, expected):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **{**PLAIN, **changes})
    assert is_swiglu(config) is expected


def test_the_layers_of_a_model_have_it_and_megatron_knows_how_to_build_them(tiny, tiny_qwen2, caplog):
    (chunk,) = tiny.build_policy(tiny_qwen2).chunks
    mlps = [module for name, module in chunk.named_modules() if name.endswith(".mlp")]
    assert len(mlps) > 1 and all(isinstance(mlp, SwiGLUMLP) for mlp in mlps)
    assert all(mlp.tp_group is not None for mlp in mlps)
    assert "Unknown MLP" not in caplog.text
