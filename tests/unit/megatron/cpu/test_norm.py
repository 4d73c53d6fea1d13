import pytest
import torch
from megatron.core.transformer import TransformerConfig

from nemo_edo.megatron.cpu.norm import TorchNorm


def config(**fields) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, **fields})


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_norm_has_mean_square_one_and_takes_eps_and_size(name):
    norm = TorchNorm(config(normalization=name), 16, eps=0.5)
    x = 3 + torch.randn(5, 16, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if name == "LayerNorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(norm.double()(x), expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_weights_are_marked_where_ranks_share_the_tokens(name, shared):
    norm = TorchNorm(config(normalization=name, tensor_model_parallel_size=2, sequence_parallel=shared), 8)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [shared] * len(norm.state_dict())


def test_another_norm_is_an_error_that_names_the_field():
    with pytest.raises(ValueError, match="normalization"):
        TorchNorm(config(normalization="L2Norm"), 8)
