from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from nemo_edo.megatron.kernels import kernels


@pytest.fixture(scope="module")
def chunks(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2).chunks


def test_a_cpu_model_runs_on_torch_and_megatron_alone(chunks):
    found = kernels(chunks)
    assert found["norm"] == "nemo_edo.megatron.norm.RMSNorm"
    assert found["matrix products"] == "megatron.core.tensor_parallel.layers.RowParallelLinear"
    assert found["optimizer"] == "torch.optim.adamw.AdamW"
    assert found["rotary embedding"] == "torch"
    assert not [what for what in found.values() if "transformer_engine" in what or "apex" in what]


def test_a_norm_inside_a_matrix_product_is_named_by_that_one():
    class LayerNormLinear(torch.nn.Module):
        pass

    attention = SimpleNamespace(core_attention=torch.nn.ReLU(), linear_qkv=LayerNormLinear(), linear_proj=IdentityOp())
    layer = SimpleNamespace(input_layernorm=IdentityOp(), self_attention=attention)
    config = SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise", apply_rope_fusion=True)
    found = kernels([SimpleNamespace(decoder=SimpleNamespace(layers=[layer]), config=config)])
    assert found["norm"].endswith("LayerNormLinear")
    assert found["matrix products"].endswith("IdentityOp, fp8 tensorwise")
    assert found["softmax"] == "in the attention"
    assert found["rotary embedding"] == "fused"
