import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from nemo_edo.megatron.cpu import swiglu as module
from nemo_edo.megatron.cpu.swiglu import SwiGLUMLP, is_swiglu, swiglu


@pytest.mark.parametrize("shape", [(), (9,), (5, 4)])
@pytest.mark.parametrize("block_bytes", [1, 7 * 6 * 4, 1 << 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_values_and_gradients_are_those_of_torchs_silu_and_product(monkeypatch, dtype, tolerance, block_bytes, shape):
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    both, upstream = (2 * torch.randn(*shape, width).to(dtype) for width in (6, 3))
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


PLAIN = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
         "bias_activation_fusion": False}


@pytest.mark.parametrize(("field", "other"), [
    ("activation_func", F.gelu), ("gated_linear_unit", False), ("add_bias_linear", True),
    ("activation_func_clamp_value", 7.0), ("glu_linear_offset", 1.0),
])
def test_it_is_for_the_plain_gated_silu_alone(field, other):
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    assert is_swiglu(TransformerConfig(**shape, **PLAIN))
    assert not is_swiglu(TransformerConfig(**shape, **{**PLAIN, field: other}))


def test_the_layers_of_a_model_have_it(policy):
    mlps = [module for name, module in policy.chunks[0].named_modules() if name.endswith(".mlp")]
    assert len(mlps) > 1 and all(isinstance(mlp, SwiGLUMLP) for mlp in mlps)


def test_blocks_are_for_caches_of_cpus_and_a_gpu_takes_all_at_once():
    rows = torch.empty(4096, 1024)
    assert len(list(module._blocks(rows))) == rows.nbytes // module.BLOCK_BYTES == 16
    assert len(list(module._blocks(rows.to("meta")))) == 1
