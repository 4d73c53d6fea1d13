"""The memory estimates' formulas: what they add up to, and how splits and recomputation change them."""

from dataclasses import replace

import pytest

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.doctor import memory
from nemo_edo.doctor.memory import Workload, all_stages, stage_memory
from nemo_edo.model_shape import ModelShape

SHAPE = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=4,
                   kv_channels=16, vocab_size=512, tied=False, qkv_bias=True, qk_norm=False)
BF16 = PrecisionConfig("bf16")


def load(parallelism: ParallelismConfig | None = None, shape: ModelShape = SHAPE, **changes) -> Workload:
    settings = {"precision": BF16, "lora": LoRAConfig(), "data_parallel": 1, "tokens": 64, **changes}
    return Workload(shape=shape, parallelism=parallelism or ParallelismConfig(), **settings)


def split(**settings) -> ParallelismConfig:
    return ParallelismConfig(**settings)


# --- weights, gradients, optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_hold_the_model_once_and_a_tied_output_layer_as_a_second_copy(tied: bool, stages: int):
    whole = load(split(pipeline_model_parallel_size=stages), replace(SHAPE, tied=tied))
    held = sum(memory.parameters(whole, stage) for stage in range(stages))
    copies = SHAPE.embedding_parameters if tied and stages > 1 else 0
    assert held == whole.shape.parameters + copies


def test_tensor_parallel_ranks_hold_the_model_once_and_norms_each():
    whole, part = (memory.parameters(load(split(tensor_model_parallel_size=size)), 0) for size in (1, 4))
    norms = SHAPE.num_layers * SHAPE.layer_norms + SHAPE.hidden_size
    assert 4 * part == whole + 3 * norms


@pytest.mark.parametrize(("dtype", "weights", "optimizer"), [("bf16", 2, 12), ("fp32", 4, 8)])
def test_bytes_a_parameter_are_those_of_mixed_precision_adam(dtype: str, weights: int, optimizer: int):
    parts, n = stage_memory(load(precision=PrecisionConfig(dtype)), 0), SHAPE.parameters
    assert (parts.weights, parts.gradients, parts.optimizer) == (weights * n, 4 * n, optimizer * n)


def test_the_distributed_optimizer_splits_its_state_over_data_and_context_ranks():
    sharded = split(use_distributed_optimizer=True, context_parallel_size=2)
    assert memory.optimizer_bytes(load(sharded, data_parallel=3), 0) == pytest.approx(2 * SHAPE.parameters, rel=1e-3)
    alike = load(split(context_parallel_size=2), data_parallel=3)
    assert memory.optimizer_bytes(alike, 0) == 12 * SHAPE.parameters


def test_offloaded_state_moves_to_the_host():
    sharded = split(use_distributed_optimizer=True, optimizer_offload_fraction=0.75)
    assert memory.optimizer_bytes(load(sharded), 0) == 3 * SHAPE.parameters
    assert memory.host_bytes(load(sharded), 0) == 9 * SHAPE.parameters


def test_adapters_alone_have_gradients_and_optimizer_state():
    lora = LoRAConfig(rank=4, targets=["linear_qkv"])
    adapters = SHAPE.num_layers * 4 * (SHAPE.hidden_size + SHAPE.query_width + 2 * SHAPE.key_width)
    parts = stage_memory(load(lora=lora), 0)
    assert (parts.gradients, parts.optimizer) == (4 * adapters, 12 * adapters)
    assert parts.weights == 2 * (SHAPE.parameters + adapters)


@pytest.mark.parametrize(("where", "gpu", "host"), [("none", 0, 0), ("resident", 2 * SHAPE.parameters, 0),
                                                    ("host", 2 * 512 * 64, 2 * SHAPE.parameters)])
def test_the_reference_is_on_the_gpu_or_in_host_memory(where: str, gpu: int, host: int):
    found = load(reference=where)
    assert (memory.reference_bytes(found, 0), memory.host_bytes(found, 0)) == (gpu, host)


def test_fp8_weights_stand_beside_those_of_bf16_or_in_their_place():
    matrices = SHAPE.num_layers * sum(rows * columns for rows, columns in SHAPE.layer_matrices.values())
    plain = memory.weight_bytes(load(), 0)
    beside = memory.weight_bytes(load(precision=PrecisionConfig("bf16", fp8="hybrid")), 0)
    instead = memory.weight_bytes(load(precision=PrecisionConfig("bf16", fp8="hybrid", fp8_param_gather=True)), 0)
    assert (beside - plain, instead - plain) == (2 * matrices, 0)


# --- experts --------------------------------------------------------------------------------------------------------

EXPERTS = replace(SHAPE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48)
OF_ALL_LAYERS = 8 * 8 * 3 * 48 * 64
"""Layers, experts, matrices of each, width, hidden size."""


@pytest.mark.parametrize(("sizes", "ranks"), [
    ({"expert_model_parallel_size": 4}, 4), ({"expert_tensor_parallel_size": 2}, 2),
    ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 4}, 8),
])
def test_a_rank_has_its_share_of_the_experts_and_the_rest_of_a_layer_whole(sizes: dict, ranks: int):
    whole = memory.parameters(load(shape=EXPERTS), 0)
    assert whole == EXPERTS.parameters
    part = memory.parameters(load(split(**sizes), EXPERTS, data_parallel=8), 0)
    assert whole - part == OF_ALL_LAYERS - OF_ALL_LAYERS // ranks


def test_the_distributed_optimizer_splits_experts_over_the_ranks_that_have_the_same():
    sharded = split(expert_model_parallel_size=4, use_distributed_optimizer=True)
    rest = EXPERTS.parameters - OF_ALL_LAYERS
    expected = 12 * (rest / 8 + OF_ALL_LAYERS / 4 / 2)
    assert memory.optimizer_bytes(load(sharded, EXPERTS, data_parallel=8), 0) == pytest.approx(expected, abs=24)


def test_adapters_beside_the_attention_leave_experts_without_gradients():
    lora = LoRAConfig(rank=4, targets=["linear_qkv"])
    trained = EXPERTS.num_layers * 4 * (EXPERTS.hidden_size + EXPERTS.query_width + 2 * EXPERTS.key_width)
    sharded = split(expert_model_parallel_size=4, use_distributed_optimizer=True)
    parts = stage_memory(load(sharded, EXPERTS, data_parallel=8, lora=lora), 0)
    assert (parts.gradients, parts.optimizer) == (4 * trained, 12 * trained / 8)


def test_every_token_has_a_row_in_each_of_its_experts_and_ranks_that_share_these_gather_the_rows():
    def of_experts(**sizes) -> float:
        without = replace(EXPERTS, moe_router_topk=0)
        return sum(sign * memory.layer_activation_bytes(load(split(**sizes), shape))
                   for sign, shape in ((1, EXPERTS), (-1, without)))

    row = 64 + 3 * 48
    assert of_experts() == 64 * 2 * 2 * row
    parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert of_experts(**parallel, expert_tensor_parallel_size=1) == 64 * 2 * 2 * row / 4
    assert of_experts(**parallel) == 64 * 2 * 2 * (64 + 3 * 48 / 4)


# --- activations ----------------------------------------------------------------------------------------------------


def test_sequence_parallelism_divides_all_of_a_layer_by_the_tensor_parallel_size():
    whole = memory.layer_activation_bytes(load())
    sharded = memory.layer_activation_bytes(load(split(tensor_model_parallel_size=4, sequence_parallel=True)))
    replicated = memory.layer_activation_bytes(load(split(tensor_model_parallel_size=4)))
    assert 4 * sharded == whole
    assert replicated - sharded == 64 * 2 * 3 * SHAPE.hidden_size  # 3/4 of both norms' inputs and outputs


def test_context_parallelism_divides_the_tokens():
    whole, half = (memory.layer_activation_bytes(load(split(context_parallel_size=size))) for size in (1, 2))
    assert 2 * half == whole


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_keeps_as_many_micro_batches_as_stages_from_it_to_the_end(stages: int):
    """1F1B: the first stage keeps all layers' worth of activations, however many stages there are."""
    whole, layer = load(split(pipeline_model_parallel_size=stages)), memory.layer_activation_bytes(load())
    kept = [memory.activation_bytes(whole, stage) - layer for stage in range(stages)]
    assert kept == [(stages - stage) * SHAPE.num_layers // stages * layer for stage in range(stages)]


def test_interleaving_keeps_more_by_the_share_of_korthikanti_et_al():
    """1 + (p - 1) / (p v) of the layers on the first of p stages with v chunks: their section 4.2.3."""
    pipeline, virtual = 4, 2
    found = load(split(pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual))
    layer = memory.layer_activation_bytes(found)
    kept = memory.activation_bytes(found, 0) - layer
    assert kept == pytest.approx(SHAPE.num_layers * layer * (1 + (pipeline - 1) / (pipeline * virtual)))


def test_full_recomputation_keeps_a_layers_input_of_each_group():
    layer = memory.layer_activation_bytes(load())
    for group, inputs in ((1, 8), (3, 3), (8, 1)):
        found = load(split(recompute_granularity="full", recompute_num_layers=group))
        assert memory.activation_bytes(found, 0) == inputs * 64 * 64 * 2 + (group + 1) * layer


def test_block_recomputation_leaves_the_layers_behind_the_block_as_they_are():
    block = split(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    layer = memory.layer_activation_bytes(load())
    assert memory.kept_of_layers(load(block)) == 2 * 64 * 64 * 2 + 6 * layer


def test_logits_are_the_last_stages_and_a_fused_loss_holds_a_block_of_them():
    stages = load(split(pipeline_model_parallel_size=2, tensor_model_parallel_size=2))
    assert [memory.loss_layer_bytes(stages, stage) for stage in (0, 1)] == [0, 64 * 256 * (2 + 4) * 2]
    large = replace(load(), tokens=8192, shape=replace(SHAPE, vocab_size=2**17))
    plain, fused = memory.loss_layer_bytes(large, 0), memory.loss_layer_bytes(replace(large, fused_loss=True), 0)
    assert fused < plain / 50


# --- generation and the whole ---------------------------------------------------------------------------------------


def test_the_cache_is_keys_and_values_of_every_row_and_layer():
    found = load(split(tensor_model_parallel_size=2), generation_rows=10, generation_length=100)
    a_layer = 10 * 100 * 2 * SHAPE.key_width // 2 * 2
    assert memory.generation_bytes(found, 0) == (SHAPE.num_layers + 1) * a_layer + 2 * 4 * 10 * SHAPE.vocab_size
    assert memory.generation_bytes(load(), 0) == 0


@pytest.mark.parametrize("rows", [1, 10_000])
def test_the_total_counts_training_or_generation_whichever_is_larger(rows: int):
    parts = stage_memory(load(generation_rows=rows, generation_length=64), 0)
    training = parts.activations + parts.loss_layer
    assert (training > parts.generation) is (rows == 1)
    held = parts.weights + parts.gradients + parts.optimizer + parts.reference + max(training, parts.generation)
    assert parts.total == held + parts.overhead
    assert parts.overhead == memory.OVERHEAD + round(memory.FRAGMENTATION * held)


def test_items_are_every_part_by_its_name():
    parts = stage_memory(load(), 0)
    assert dict(parts.items())["loss layer"] == parts.loss_layer
    assert len(all_stages(load(split(pipeline_model_parallel_size=4)))) == 4
