"""Layers without Transformer Engine: attention, norms and rotations against Megatron's own, packs against each sequence
alone."""

import sys
from dataclasses import replace

import pytest
import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.megatron.cpu.attention import SDPAttention
from nemo_edo.megatron.cpu.families import TorchNorm
from nemo_edo.megatron.layer_spec import FUSED, check_packing, choose_attention, kernels, set_layer_spec
from nemo_edo.megatron.packing import PackedSequences
from nemo_edo.megatron.platform import device_and_groups

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def groups():
    device_and_groups(ParallelismConfig(), seed=0, threads=1)


def config(**fields) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
                                "attention_dropout": 0.0, **fields})


def core(kind: type, settings: TransformerConfig, **options):
    return kind(settings, 2, AttnMaskType.causal, "self", **options)


def tensors(queries: int, keys: int, batch: int = 3, heads: int = 4, groups: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, batch, heads, 16), (keys, batch, groups, 16), (keys, batch, groups, 16)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def value_and_gradients(attention, inputs):
    value = attention(*inputs, None)
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    return value, *torch.autograd.grad((value * weights).sum(), inputs)


@pytest.mark.parametrize("settings", [
    {}, {"num_query_groups": 4}, {"num_query_groups": 1},
    {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
], ids=str)
@pytest.mark.parametrize(("scale", "queries"), [(None, 1), (0.4, 2), (None, 33)])
def test_values_and_gradients_are_those_of_megatrons_attention(settings, scale, queries):
    settings = config(**settings)
    inputs = tensors(queries, queries, groups=settings.num_query_groups)
    found, expected = (value_and_gradients(core(kind, settings, softmax_scale=scale), inputs)
                       for kind in (SDPAttention, DotProductAttention))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_values_in_bf16_are_the_same_with_and_without_gradients():
    """Otherwise the first step's ratio to the log-probabilities of a pass without them would not be 1."""
    attention, inputs = core(SDPAttention, config()), [part.bfloat16() for part in tensors(33, 33)]
    assert torch.equal(attention(*inputs, None), attention(*(part.detach() for part in inputs), None))


@pytest.mark.parametrize(("fields", "told"), [
    ({"window_size": (4, 0)}, "sliding-window"),
    ({"softmax_type": "learnable"}, "sinks"),
    ({"attention_dropout": 0.1}, "dropout"),
    ({"context_parallel_size": 2}, "context parallelism"),
])
def test_what_it_cannot_compute_is_refused_and_left_to_megatrons_attention(fields, told, caplog):
    settings = replace(config(), **fields)
    with pytest.raises(UserError, match=f"model.attention=sdpa.*{told}"):
        choose_attention("sdpa", settings, CPU, has_te=False)
    assert choose_attention("auto", settings, CPU, has_te=False) == "local"
    assert told in caplog.text


@pytest.mark.parametrize(("attention", "device", "has_te", "chosen"), [
    ("auto", CPU, False, "sdpa"), ("auto", CPU, True, "sdpa"), ("auto", GPU, False, "sdpa"), ("auto", GPU, True, "te"),
    ("local", GPU, True, "local"), ("sdpa", GPU, True, "sdpa"), ("te", GPU, True, "te"), ("te", CPU, True, None),
    ("te", GPU, False, None),
])
def test_attention_is_chosen_by_the_config_and_the_machine(attention, device, has_te, chosen):
    if chosen:
        assert choose_attention(attention, config(), device, has_te=has_te) == chosen
    else:
        with pytest.raises(UserError, match="needs Transformer Engine and a GPU"):
            choose_attention(attention, config(), device, has_te=has_te)


def test_a_gpu_without_transformer_engine_builds_llama_with_what_there_is_and_says_so(policy, caplog):
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    fusions = {"apply_rope_fusion": True, "masked_softmax_fusion": True}  # as Bridge asks for of a Llama
    provider = GPTModelProvider(
        num_layers=1, hidden_size=64, num_attention_heads=2, attention_dropout=0.0, vocab_size=128, **fusions)
    set_layer_spec(provider, "auto", GPU)
    provider.finalize()  # Megatron's own checks: it refuses fusions that are not installed
    assert not provider.apply_rope_fusion
    assert "Transformer Engine is absent" in caplog.text


def test_packing_in_fp32_is_refused_with_attention_that_is_not_ours(policy, monkeypatch):
    layers = unwrap_model(policy.chunks[0]).decoder.layers
    for layer in layers:
        monkeypatch.setitem(layer.self_attention._modules, "core_attention", torch.nn.Identity())
    with pytest.raises(UserError, match="no kernel for packing in fp32: set model.attention=sdpa"):
        check_packing(policy.chunks)
    monkeypatch.setattr(layers[0].self_attention.config, "params_dtype", torch.bfloat16)
    check_packing(policy.chunks)


def test_a_pack_on_a_gpu_is_cut_without_reading_from_it():
    on_gpu = [part.to("meta") for part in tensors(12, 12, batch=1)]  # no value of them can be read
    boundaries = torch.tensor([0, 5, 12], dtype=torch.int32, device="meta")
    pack = PackedSequences("thd", boundaries, boundaries, max_seqlen_q=7, max_seqlen_kv=7, lengths=(5, 7))
    output = core(SDPAttention, config())(*(part[:, 0] for part in on_gpu), None, packed_seq_params=pack)
    assert output.shape == (12, on_gpu[0][0, 0].numel())


def test_packing_and_shared_prompts_are_refused_with_layers_that_cannot_compute_them(
    policy, tiny, tiny_qwen2, monkeypatch
):
    from megatron.bridge.models.falcon_h1.modeling_falconh1.falconh1_layer import FalconH1Layer
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2FlexDotProductAttention

    check_packing(policy.chunks, share_prompts=True)
    local = tiny.build_policy(tiny_qwen2, attention="local").chunks
    for layers in (local, [bare(FalconH1Layer)], [bare(Gemma2FlexDotProductAttention)]):
        with pytest.raises(UserError, match="packing needs layers that keep packed sequences apart.*set packing=false"):
            check_packing(layers)
    monkeypatch.setattr("nemo_edo.megatron.layer_spec.rotates", lambda config: False)
    with pytest.raises(UserError, match="set share_prompts=false"):
        check_packing(policy.chunks, share_prompts=True)


def bare(kind: type) -> torch.nn.Module:
    """A layer of Megatron's or Bridge's without its parts."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    return layer


def test_layers_without_attention_are_told_and_not_decoded_in_process(policy, tiny, monkeypatch):
    """As the first ones of Nemotron-H, Falcon-H1 and Qwen3-Next, which need a GPU."""
    whole, layers = kernels(policy.chunks), unwrap_model(policy.chunks[0]).decoder.layers
    for layer, told in zip(layers, (whole["attention"], "none in this stage's layers"), strict=True):
        monkeypatch.setitem(layer._modules, "self_attention", bare(GatedDeltaNet))
        assert kernels(policy.chunks)["attention"] == told
    with pytest.raises(UserError, match="linear attention: set generation=vllm"):
        tiny.build_engine(policy)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_weights_are_marked_where_ranks_share_the_tokens(name, shared):
    norm = TorchNorm(config(normalization=name, tensor_model_parallel_size=2, sequence_parallel=shared), 64)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [shared] * len(norm.state_dict())


def test_a_cpu_model_runs_on_torch_and_megatron_alone(policy):
    found = kernels(policy.chunks)
    assert found["norm"] == "torch.nn.modules.normalization.RMSNorm"
    assert found["matrix products"] == "megatron.core.tensor_parallel.layers.RowParallelLinear"
    assert found["optimizer"] == "torch.optim.adamw.AdamW"
    assert found["rotary embedding"] == "torch"
    assert {found[part] for part in FUSED} == {"absent: the device is a CPU"}
    assert not [what for what in found.values() if "transformer_engine" in what or "apex" in what]
    # Stand-ins never make Megatron-core believe in Transformer Engine.
    assert "transformer_engine" not in sys.modules
    assert not sys.modules["megatron.core.extensions.transformer_engine"].HAVE_TE
