"""Every split over two gloo processes, and pairs of splits over four, against one process, for the shapes of Qwen2,
Qwen3, Llama and Qwen3-MoE, and gpt-oss and DeepSeek-V2 where their layers are split in a special way.

Each option meets each split that treats it in a special way; the models take turns.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import write_tiny_model
from safetensors.torch import load_file

from nemo_edo.config import ParallelismConfig

pytestmark = pytest.mark.distributed
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
FUSED, SHARED_PROMPTS = {"head": "fused"}, {"packing": True, "share_prompts": True, "tokens": (26, 13)}
PACKED = {"packing": True, "tokens": (32, 16)}  # with context parallelism, sequences are padded
ATTENTION, ALL = ["linear_qkv", "linear_proj"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
TIED = {"tie_word_embeddings": True}
MODELS = {
    "qwen2, tied": ("qwen2", TIED), "qwen3": ("qwen3", {}), "qwen3, tied": ("qwen3", TIED), "llama": ("llama", {}),
    "llama, tied": ("llama", TIED),
    # Twelve: the second process's are 6 to 11, whose names are in another order than their numbers.
    "experts": ("qwen3_moe", {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                              "norm_topk_prob": True, "mlp_only_layers": []}),
    "experts with biases": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "latent": ("deepseek_v2", {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "n_group": 1, "first_k_dense_replace": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}),
}
CASES = {
    "tensor, fused head": ("qwen3", TENSOR, FUSED),
    "sequence, fused head, tied": ("qwen2, tied", SEQUENCE, FUSED),
    "sequence, lora": ("qwen3", SEQUENCE, {"lora": ALL}),
    "sequence, shared prompts": ("qwen3", SEQUENCE, SHARED_PROMPTS),
    "sequence, recomputed": ("llama", {**SEQUENCE, "recompute_granularity": "full"}, {}),
    "interleaved, lora, tied": ("qwen2, tied", INTERLEAVED, {"lora": ALL}),
    "interleaved, shared prompts": ("llama", INTERLEAVED, SHARED_PROMPTS),
    "interleaved, overlap, tied": ("llama, tied", {**INTERLEAVED, "overlap_grad_reduce": True}, {}),
    "data, distributed optimizer, overlap": (
        "qwen2, tied", {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
    "context, by tokens, distributed optimizer": ("llama", {**CONTEXT, **SHARDED}, {"tokens": (40, 13)}),
    "sequence and context, packed, tied": ("qwen2, tied", {**SEQUENCE, **CONTEXT}, PACKED),
    "pipeline and context, packed": ("llama", {**PIPELINE, **CONTEXT}, PACKED),
    "sequence and pipeline, tied": ("qwen3, tied", {**SEQUENCE, **PIPELINE}, {}),
    "expert, distributed optimizer": ("experts", {**EXPERTS, **SHARDED}, {}),
    "expert, lora": ("experts", EXPERTS, {"lora": ATTENTION}),
    "biases, sequence": ("experts with biases", {**SEQUENCE, "expert_tensor_parallel_size": 1}, {}),
    "latent, sequence": ("latent", SEQUENCE, {}),
    "expert, sequence": ("experts", {**EXPERTS, **SEQUENCE, "expert_tensor_parallel_size": 1}, {}),
}
"""Name: model, sizes, and what else is done."""
GENERATING = [name for name, (_, sizes, _) in CASES.items() if not sizes.keys() & (EXPERTS | CONTEXT).keys()]
"""The engine refuses the others."""
QUICK = "sequence, shared prompts"


def params(*names: str) -> list:
    """One split is part of the quick tests."""
    return [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a model, which is written when it is first asked for."""
    folder = tmp_path_factory.mktemp("splits")

    @cache
    def written(name: str) -> Path:
        model_type, fields = MODELS[name]
        write_tiny_model(folder / name, model_type, num_hidden_layers=4, **fields)
        return folder / name

    return written


@pytest.fixture(scope="module")
def single(one, folder_of):
    """What one process finds with the logits' head and without packing, which change nothing."""
    found = {}

    def measure(model: str, lora: list[str] | None) -> dict:
        key = model, bool(lora)
        if key not in found:
            [found[key]] = one.run("helpers.split_cases:measure", folder=folder_of(model), sizes={}, lora=lora)
        return found[key]

    return measure


@pytest.fixture(scope="module", params=params(*CASES))
def split(request, two, folder_of, single) -> tuple[dict, dict, dict]:
    """What the split's processes found, what one did, and the weights that both loaded."""
    model, sizes, options = CASES[request.param]
    cases = "context_cases" if "context_parallel_size" in sizes else "split_cases"
    pool = request.getfixturevalue("four") if ParallelismConfig(**sizes).model_ranks == 4 else two
    found = pool.run(f"helpers.{cases}:measure", folder=folder_of(model), sizes=sizes, **options)[0]
    return found, single(model, options.get("lora")), load_file(folder_of(model) / "model.safetensors")


def test_a_weight_whose_gradient_ranks_have_in_parts_ends_the_first_step(two, folder_of):
    told = two.run("helpers.split_cases:a_part_of_a_gradient", folder=folder_of("llama"), sizes=SEQUENCE)
    assert all("different gradients of module.decoder.layers.0.pre_mlp_layernorm.weight" in one for one in told)


def test_exported_weights_are_the_loaded_ones_to_the_last_bit(split):
    *results, expected = split
    for found in (result["exported"] for result in results):
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_logprobs_entropies_and_the_loss_are_those_of_one_process(split):
    found, expected, _ = split
    for values in ("logprobs", "entropies"):
        assert expected[values].abs().max() > 1, "the check needs values that differ from zero"
        torch.testing.assert_close(found[values], expected[values], rtol=2e-6, atol=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_gradients_of_every_weight_are_those_of_one_process(split):
    """Relative to the weight's largest; a bias of keys has none, since softmax does not see it."""
    found, expected = split[0]["gradients"], split[1]["gradients"]
    assert found.keys() == expected.keys()
    whole = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        if name.endswith("k_proj.bias"):
            scale = whole
        elif ".experts." in name and scale == 0:
            assert found[name].abs().max() == 0, f"{name}: no token of the batch chose this expert"
            continue
        else:
            assert scale > 1e-4 * whole or "lora_A" in name, f"{name} has hardly any gradient: nothing to compare"
        error = (found[name] - gradient).abs().max()
        assert error <= 1e-4 * scale, f"{name}: {error / scale:.1e}"


def test_steps_have_the_gradient_norms_and_the_weights_of_one_process(split):
    found, expected, _ = split
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["norms"][0] != pytest.approx(found["norms"][1], rel=1e-4), "the step changed nothing"
    for name, weight in expected["trained"].items():
        torch.testing.assert_close(found["trained"][name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("split", params(*GENERATING), indirect=True)
def test_greedy_responses_are_those_of_one_process(split):
    found, expected, _ = split
    assert found["responses"] == expected["responses"]
