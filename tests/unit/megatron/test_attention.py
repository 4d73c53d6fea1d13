"""torch's attention in Megatron's layers against Megatron's own, and packed sequences against each one alone."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError
from nemo_edo.losses import sft_loss
from nemo_edo.megatron.attention import SDPAttention
from nemo_edo.megatron.forward_backward import MicroBatching
from nemo_edo.megatron.layer_spec import check_packing, choose_attention
from nemo_edo.types import GenerationRequest, SamplingParams

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
MODELS = {
    "qwen2": {},
    "qwen3": {"num_key_value_heads": 4},
    "llama": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def groups():
    from nemo_edo.megatron.build import device_and_groups

    device_and_groups(ParallelismConfig(), seed=0, threads=1)


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """model(type): its folder, and its policy with torch's attention and with Megatron's own."""
    made = {}

    def make(model_type: str) -> SimpleNamespace:
        if model_type not in made:
            folder = tiny.write_tiny_model(tmp_path_factory.mktemp(model_type), model_type, **MODELS[model_type])
            made[model_type] = SimpleNamespace(
                folder=folder, sdpa=tiny.build_policy(folder), local=tiny.build_policy(folder, attention="local")
            )
        return made[model_type]

    return make


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


# --- against Megatron's own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {}, {"num_query_groups": 4}, {"num_query_groups": 1},
    {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
], ids=str)
@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("queries", [1, 2, 33])
def test_values_and_gradients_are_those_of_megatrons_attention(settings, scale, queries):
    settings = config(**settings)
    inputs = tensors(queries, queries, groups=settings.num_query_groups)
    found, expected = (value_and_gradients(core(kind, settings, softmax_scale=scale), inputs)
                       for kind in (SDPAttention, DotProductAttention))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_query_behind_a_cache_attends_to_all_of_it():
    query, key, value = tensors(1, 9)
    found, expected = (core(kind, config())(query, key, value, None, attn_mask_type=AttnMaskType.no_mask)
                       for kind in (SDPAttention, DotProductAttention))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_models_log_probs_and_gradients_are_those_with_megatrons_attention(model, tiny, model_type):
    policies, batch = model(model_type), tiny.random_batch(rows=4)
    results = []
    for policy in (policies.sdpa, policies.local):
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy.forward_backward(
            batch, lambda log_probs, entropies, micro: ({"sft": sft_loss(log_probs, micro.mask)}, {}),
            loss_counts={"sft": float(batch.mask.sum())}, micro_batching=MicroBatching(2), temperature=1.0,
        )
        log_probs = policy.log_probs(batch, micro_batching=MicroBatching(2), temperature=1.0)[0]
        results.append((log_probs, tiny.exported_gradients(policy)))
    (found, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, gradient in expected_gradients.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-5, f"{name} is off by {error} of its largest element"


def test_greedy_responses_to_prompts_of_many_lengths_are_those_with_megatrons_attention(model, tiny):
    draw, policies = random.Random(0), model("qwen2")
    prompts = [tuple(draw.choices(range(12, 128), k=k)) for k in (11, 4, 1, 7, 2, 4, 5)]
    requests = [GenerationRequest(f"p-{n}", 0, prompt, seed=n) for n, prompt in enumerate(prompts)]
    found, expected = (tiny.build_engine(policy, stop_ids=range(1, 12)).generate(requests, SamplingParams(0.0, 1.0, 12))
                       for policy in (policies.sdpa, policies.local))
    assert [rollout.response_ids for rollout in found] == [rollout.response_ids for rollout in expected]
    assert len({len(rollout.response_ids) for rollout in found}) > 1


# --- packed sequences ---------------------------------------------------------------------------------------------


def packed(*lengths: int) -> PackedSeqParams:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def test_each_packed_sequence_attends_to_itself_alone():
    inputs = tensors(12, 12, batch=1)
    attention = core(SDPAttention, config())
    found = attention(*(part.squeeze(1) for part in inputs), None, packed_seq_params=packed(5, 1, 6))
    expected = [attention(*(part[start:end] for part in inputs), None) for start, end in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(found, torch.cat(expected).squeeze(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_log_probs_are_those_of_transformers(model, tiny, model_type):
    """With Llama 3's scaling of rotary positions too."""
    policies, batch = model(model_type), tiny.random_batch(rows=5, length=60)
    found = policies.sdpa.log_probs(batch, micro_batching=MicroBatching(1, 200, packing=True), temperature=1.0)
    with torch.no_grad():
        expected = tiny.dense_log_probs(tiny.load_dense(policies.folder), batch.tokens)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours * batch.mask, theirs * batch.mask, rtol=0, atol=1e-4)


def test_llama_3_scaling_of_rotary_positions_changes_what_these_tests_compare(model, tiny):
    batch = tiny.random_batch(rows=5, length=60)
    dense = [tiny.load_dense(model("llama").folder) for _ in range(2)]
    rotary = dense[1].model.rotary_emb
    rotary.inv_freq = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    with torch.no_grad():
        scaled, plain = (tiny.dense_log_probs(model_, batch.tokens)[0] * batch.mask for model_ in dense)
    assert (scaled - plain).abs().max() > 1e-2


@pytest.mark.parametrize("multiple", [4, 7])
def test_a_pack_that_is_padded_to_a_multiple_has_the_same_log_probs(model, tiny, monkeypatch, multiple):
    from nemo_edo.megatron import forward_backward
    from nemo_edo.megatron.shapes import InputShapes

    policy, batch = model("qwen2").sdpa, tiny.random_batch(rows=6)
    cut = {"micro_batching": MicroBatching(1, 41, packing=True), "temperature": 1.0}
    expected = policy.log_probs(batch, **cut)
    seen = []
    plain = forward_backward.packed_inputs

    def look(micro, lengths, shape):
        seen.append(shape)
        return plain(micro, lengths, shape)

    monkeypatch.setattr(forward_backward, "packed_inputs", look)
    monkeypatch.setattr(forward_backward, "input_shapes", lambda _: InputShapes(multiple=multiple))
    found = policy.log_probs(batch, **cut)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert {rows for rows, _ in seen} == {1}
    assert all(length % multiple == 0 and length <= 41 for _, length in seen)


# --- what it is not used for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "told"), [
    ({"window_size": (4, 0)}, "sliding-window"),
    ({"softmax_type": "learnable"}, "sinks"),
    ({"softmax_type": "off-by-one"}, "sinks"),
    ({"attention_dropout": 0.1}, "dropout"),
    ({"context_parallel_size": 2}, "context parallelism"),
    ({"multi_latent_attention": True}, "multi-latent"),
    ({"fp8_dot_product_attention": True}, "FP8"),
    ({"qk_clip": True}, "qk_clip"),
])
def test_what_it_cannot_compute_is_refused_and_left_to_megatrons_attention(fields, told, caplog):
    settings = replace(config(), **fields)
    with pytest.raises(ValueError, match=f"without .*{told}.*, which the model needs"):
        core(SDPAttention, settings)
    with pytest.raises(UserError, match=f"model.attention=sdpa, but this model needs .*{told}"):
        choose_attention("sdpa", settings, CPU, has_te=False)
    assert choose_attention("auto", settings, CPU, has_te=False) == "local"
    assert told in caplog.text


@pytest.mark.parametrize(("arguments", "told"), [
    ({"attn_mask_type": AttnMaskType.no_mask}, "self-attention, no_mask"),
    ({"attn_mask_type": AttnMaskType.padding}, "self-attention, padding"),
    ({"attention_type": "cross"}, "cross-attention, causal"),
    ({"attention_dropout": 0.1}, "without dropout"),
])
def test_attention_that_is_not_causal_or_drops_out_is_refused(arguments, told):
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", **arguments}
    with pytest.raises(ValueError, match=told):
        SDPAttention(config(), 1, **arguments)


def test_masks_biases_and_several_queries_behind_a_cache_are_refused():
    attention = core(SDPAttention, config())
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="a mask or a bias"):
        attention(*tensors(5, 5), mask)
    with pytest.raises(ValueError, match="a mask or a bias"):
        attention(*tensors(5, 5), None, attention_bias=mask.float())
    with pytest.raises(ValueError, match="3 queries to 5 keys"):
        attention(*tensors(3, 5), None)


@pytest.mark.parametrize(("attention", "device", "has_te", "chosen"), [
    ("auto", CPU, False, "sdpa"), ("auto", CPU, True, "sdpa"), ("auto", GPU, False, "sdpa"), ("auto", GPU, True, "te"),
    ("local", GPU, True, "local"), ("sdpa", GPU, True, "sdpa"), ("te", GPU, True, "te"),
])
def test_attention_is_chosen_by_the_config_and_the_machine(attention, device, has_te, chosen):
    assert choose_attention(attention, config(), device, has_te=has_te) == chosen


@pytest.mark.parametrize(("device", "has_te"), [(CPU, True), (GPU, False)])
def test_transformer_engines_attention_is_refused_where_it_cannot_run(device, has_te):
    with pytest.raises(UserError, match="needs Transformer Engine and a GPU"):
        choose_attention("te", config(), device, has_te=has_te)


def test_packing_is_refused_with_megatrons_attention(model):
    check_packing(model("qwen2").sdpa.chunks)
    with pytest.raises(UserError, match="packing needs attention that keeps packed sequences apart"):
        check_packing(model("qwen2").local.chunks)


@pytest.mark.parametrize("attention", ["local", "sdpa"])
def test_shared_prompts_are_refused_with_an_attention_that_does_not_know_them(model, attention, monkeypatch):
    chunks = model("qwen2").sdpa.chunks
    check_packing(chunks, share_prompts=True)
    if attention == "sdpa":  # whose layers turn positions in another way
        monkeypatch.setattr("nemo_edo.megatron.layer_spec.rotates", lambda config: False)
        with pytest.raises(UserError, match="share_prompts needs torch's attention and rotary positions of whole"):
            check_packing(chunks, share_prompts=True)
    else:
        with pytest.raises(UserError, match="packing needs attention"):
            check_packing(model("qwen2").local.chunks, share_prompts=True)
