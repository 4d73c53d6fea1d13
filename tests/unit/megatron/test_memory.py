"""The memory estimates against the tensors of real models, in one process."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_models

from nemo_edo.checks import memory
from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.data.batching import build_batch, sequence_lengths
from nemo_edo.data.shares import Prompts
from nemo_edo.megatron.optimizer_state import parts
from nemo_edo.megatron.shared_prompts import SharedPrompts, shared_inputs

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
CASES = {
    "qwen2, tied, bf16": ("qwen2", {"tie_word_embeddings": True}, "bf16", None),
    "qwen3, bf16": ("qwen3", {}, "bf16", None),
    "llama": ("llama", {}, "fp32", None),
    "qwen2, adapters, bf16": ("qwen2", {}, "bf16", LoRAConfig(rank=4)),
    "experts, bf16": ("qwen3_moe", EXPERTS, "bf16", None),
    "llama, some adapters": ("llama", {}, "fp32", LoRAConfig(rank=2, targets=["linear_qkv", "linear_fc2"])),
}
SHAPE = {"hidden_size": 96, "intermediate_size": 160}
FIELDS = {"qwen2": SHAPE, "qwen3": SHAPE, "qwen3_moe": {**SHAPE, **EXPERTS}}
TOKENS = 48


def measured(policy) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, after a step."""
    policy.reset_optimizer(OptimizerConfig(lr=1e-3), total_steps=2)
    tiny_models.train_sft(policy, [0])
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    of_weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    state = {}  # moments and main weights; fp32 main weights that are the weights themselves are not counted again
    for part in parts(policy.optimizer):
        for main in (main for group in part.optimizer.param_groups for main in group["params"]):
            moments = part.optimizer.state[main]
            for tensor in (main, moments["exp_avg"], moments["exp_avg_sq"]):
                if tensor.untyped_storage().data_ptr() not in of_weights:
                    state[tensor.data_ptr()] = tensor.nbytes
    return {
        "weights": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.main_grad.nbytes for parameter in trained),
        "optimizer": sum(state.values()),
    }


def workload(folder: Path, dtype: str = "fp32", lora: LoRAConfig | None = None, **parallelism) -> memory.Workload:
    fields = json.loads((folder / "config.json").read_text())
    return memory.Workload(
        shape=ModelShape.from_hf(fields, str(folder)), parallelism=ParallelismConfig(**parallelism),
        lora=lora or LoRAConfig(), precision=PrecisionConfig(dtype), data_parallel=1, tokens=TOKENS,
    )


@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_optimizer_state_are_the_estimated_ones_to_the_byte(case, tiny, tmp_path):
    model_type, fields, dtype, lora = CASES[case]
    folder = tiny.write_tiny_model(tmp_path / "model", model_type, **fields)
    parts = dict(memory.stage_memory(workload(folder, dtype, lora), 0).items())
    found = measured(tiny.build_policy(folder, dtype=dtype, lora=lora))
    assert found == {name: parts[name] for name in ("weights", "gradients", "optimizer")}


def saved_bytes(policy, tokens: int, pack: SharedPrompts | None = None) -> int:
    """Of the memory that autograd keeps of a forward pass, weights, tables and places left out."""
    (chunk,) = policy.chunks
    kept, own = {}, {p.untyped_storage().data_ptr() for p in chunk.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and not (pack and tensor.dtype == torch.int64):
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor: so that its address is not reused
        return tensor

    inputs = torch.randint(2, 120, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = chunk(inputs, torch.arange(tokens)[None], None, packed_seq_params=pack)
    assert output.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


def saved_of_a_layer(tiny, folder, model_type: str, pack: SharedPrompts | None = None, **settings) -> float:
    """What two layers more keep more, halved."""
    saved = []
    for layers in (2, 4):
        path = tiny.write_tiny_model(folder / str(layers), model_type, num_hidden_layers=layers, **FIELDS[model_type])
        saved.append(saved_bytes(tiny.build_policy(path, **settings), TOKENS, pack))
    return (saved[1] - saved[0]) / 2


@pytest.mark.parametrize(("model_type", "shared"), [("qwen2", False), ("qwen3", True), ("qwen3_moe", True)])
def test_activations_of_a_layer_are_little_less_than_autograd_keeps_on_a_cpu(tiny, tmp_path, model_type, shared):
    """Whose unfused kernels keep normed vectors, cosines, gates and what routing chooses as well. Shared: four
    responses of 9 tokens to a prompt of 13 are 48 tokens, and 84 with the prompt counted for each."""
    micro = build_batch([([*range(2, 15)], [20 + row] * 9) for row in range(4)], pad_id=0)
    pack = shared_inputs(micro, sequence_lengths(micro), Prompts.of(micro), (1, TOKENS)).packed if shared else None
    found = saved_of_a_layer(tiny, tmp_path, model_type, pack)
    load = replace(workload(tmp_path / "4"), copies=84 / TOKENS if shared else None)
    assert 0.55 * found < memory.layer_activation_bytes(load) < found


def test_a_recomputed_layer_keeps_its_input_and_nothing_else(tiny, tmp_path):
    full = {"recompute_granularity": "full"}
    found = saved_of_a_layer(tiny, tmp_path, "qwen2", parallelism=ParallelismConfig(**full))
    load = workload(tmp_path / "4", **full)
    assert found == memory.kept_of_layers(load) / 4
