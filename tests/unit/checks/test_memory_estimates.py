"""The memory estimates' formulas: what they add up to, and how splits and recomputation change them."""

from dataclasses import replace

import pytest

from nemo_edo.checks import estimates as memory
from nemo_edo.checks.estimates import Workload, all_stages, stage_memory
from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.model_shape import ModelShape

SHAPE = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=4,
                   kv_channels=16, vocab_size=512, tied=False, qkv_bias=True, qk_norm=False)
BF16 = PrecisionConfig("bf16")


def load(parallelism: ParallelismConfig | None = None, shape: ModelShape = SHAPE, **changes) -> Workload:
    settings = {"precision": BF16, "lora": LoRAConfig(), "data_parallel": 1, "tokens": 64, **changes}
    return Workload(shape=shape, parallelism=parallelism or ParallelismConfig(), **settings)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_hold_the_model_once_and_a_tied_output_layer_as_a_second_copy(tied: bool, stages: int):
    whole = load(ParallelismConfig(pipeline_model_parallel_size=stages), replace(SHAPE, tied=tied))
    assert len(all_stages(whole)) == stages
    held = sum(memory.parameters(whole, stage) for stage in range(stages))
    copies = SHAPE.embedding_parameters if tied and stages > 1 else 0
    assert held == whole.shape.parameters + copies


def test_tensor_parallel_ranks_hold_the_model_once_and_norms_each():
    whole, part = (memory.parameters(load(ParallelismConfig(tensor_model_parallel_size=size)), 0) for size in (1, 4))
    norms = SHAPE.num_layers * SHAPE.layer_norms + SHAPE.hidden_size
    assert 4 * part == whole + 3 * norms


@pytest.mark.parametrize(("dtype", "weights", "optimizer"), [("bf16", 2, 12), ("fp32", 4, 8)])
def test_bytes_a_parameter_are_those_of_mixed_precision_adam(dtype: str, weights: int, optimizer: int):
    parts, n = stage_memory(load(precision=PrecisionConfig(dtype)), 0), SHAPE.parameters
    assert (parts.weights, parts.gradients, parts.optimizer) == (weights * n, 4 * n, optimizer * n)


def test_the_distributed_optimizer_splits_its_state_over_data_and_context_ranks_and_may_move_it_to_the_host():
    sharded = ParallelismConfig(use_distributed_optimizer=True, context_parallel_size=2)
    assert memory.optimizer_bytes(load(sharded, data_parallel=3), 0) == pytest.approx(2 * SHAPE.parameters, rel=1e-3)
    alike = load(ParallelismConfig(context_parallel_size=2), data_parallel=3)
    assert memory.optimizer_bytes(alike, 0) == 12 * SHAPE.parameters
    offloaded = load(ParallelismConfig(use_distributed_optimizer=True, optimizer_offload_fraction=0.75))
    found = memory.optimizer_bytes(offloaded, 0), memory.host_bytes(offloaded, 0)
    assert found == (3 * SHAPE.parameters, 9 * SHAPE.parameters)


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


def test_on_a_cpu_the_reference_is_a_second_copy_in_the_same_memory_and_blocks_of_logits_are_small():
    gpu = load(reference="host", tokens=8192, shape=replace(SHAPE, vocab_size=2**17), fused_loss=True)
    cpu = replace(gpu, cpu=True)
    assert memory.reference_bytes(cpu, 0) == 2 * cpu.shape.parameters and memory.host_bytes(cpu, 0) == 0
    blocks = memory.LOSS_BLOCK - memory.CPU_LOSS_BLOCK
    assert memory.loss_layer_bytes(gpu, 0) - memory.loss_layer_bytes(cpu, 0) == 2 * blocks
    training, idle = stage_memory(gpu, 0), stage_memory(cpu, 0)
    shares = [memory.FRAGMENTATION * (found.total - found.overhead) for found in (training, idle)]
    assert [found.overhead - round(share) for found, share in zip((training, idle), shares, strict=True)] == [
        memory.OVERHEAD, memory.CPU_OVERHEAD]


def test_fp8_weights_are_added_to_those_of_bf16_or_replace_them():
    matrices = SHAPE.num_layers * sum(rows * columns for rows, columns in SHAPE.layer_matrices.values())
    plain = memory.weight_bytes(load(), 0)
    added = memory.weight_bytes(load(precision=PrecisionConfig("bf16", fp8="hybrid")), 0)
    instead = memory.weight_bytes(load(precision=PrecisionConfig("bf16", fp8="hybrid", fp8_param_gather=True)), 0)
    assert (added - plain, instead - plain) == (2 * matrices, 0)


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
    part = memory.parameters(load(ParallelismConfig(**sizes), EXPERTS, data_parallel=8), 0)
    assert whole - part == OF_ALL_LAYERS - OF_ALL_LAYERS // ranks


def test_the_distributed_optimizer_splits_experts_over_the_ranks_that_have_the_same():
    sharded = ParallelismConfig(expert_model_parallel_size=4, use_distributed_optimizer=True)
    rest = EXPERTS.parameters - OF_ALL_LAYERS
    expected = 12 * (rest / 8 + OF_ALL_LAYERS / 4 / 2)
    assert memory.optimizer_bytes(load(sharded, EXPERTS, data_parallel=8), 0) == pytest.approx(expected, abs=24)


def test_every_token_has_a_row_in_each_of_its_experts_and_ranks_that_share_these_gather_the_rows():
    def of_experts(**sizes) -> float:
        without = replace(EXPERTS, moe_router_topk=0)
        return sum(sign * memory.layer_activation_bytes(load(ParallelismConfig(**sizes), shape))
                   for sign, shape in ((1, EXPERTS), (-1, without)))

    row = 64 + 3 * 48
    assert of_experts() == 64 * 2 * 2 * row
    parallel = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert of_experts(**parallel, expert_tensor_parallel_size=1) == 64 * 2 * 2 * row / 4
    assert of_experts(**parallel) == 64 * 2 * 2 * (64 + 3 * 48 / 4)


def test_sequence_and_context_parallelism_divide_all_of_a_layer_by_their_size():
    def layer(**sizes) -> float:
        return memory.layer_activation_bytes(load(ParallelismConfig(**sizes)))

    sharded = layer(tensor_model_parallel_size=4, sequence_parallel=True)
    assert layer() == 4 * sharded == 2 * layer(context_parallel_size=2)
    # Without it, 3/4 of both norms' inputs and outputs more.
    assert layer(tensor_model_parallel_size=4) - sharded == 64 * 2 * 3 * SHAPE.hidden_size


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_keeps_as_many_micro_batches_as_stages_from_it_to_the_end(stages: int):
    """1F1B: the first stage keeps all layers' worth of activations, however many stages there are."""
    whole, layer = load(ParallelismConfig(pipeline_model_parallel_size=stages)), memory.layer_activation_bytes(load())
    kept = [memory.activation_bytes(whole, stage) - layer for stage in range(stages)]
    assert kept == [(stages - stage) * SHAPE.num_layers // stages * layer for stage in range(stages)]


def test_interleaving_keeps_more_by_the_share_of_korthikanti_et_al():
    """1 + (p - 1) / (p v) of the layers on the first of p stages with v chunks: their section 4.2.3."""
    pipeline, virtual = 4, 2
    found = load(ParallelismConfig(pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual))
    layer = memory.layer_activation_bytes(found)
    kept = memory.activation_bytes(found, 0) - layer
    assert kept == pytest.approx(SHAPE.num_layers * layer * (1 + (pipeline - 1) / (pipeline * virtual)))


def test_full_recomputation_keeps_a_layers_input_of_each_group_and_all_of_the_layers_after_a_block():
    layer = memory.layer_activation_bytes(load())
    for group, inputs in ((1, 8), (3, 3), (8, 1)):
        found = load(ParallelismConfig(recompute_granularity="full", recompute_num_layers=group))
        assert memory.activation_bytes(found, 0) == inputs * 64 * 64 * 2 + (group + 1) * layer
    block = ParallelismConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert memory.kept_of_layers(load(block)) == 2 * 64 * 64 * 2 + 6 * layer


def test_logits_are_the_last_stages_and_a_fused_loss_holds_a_block_of_them():
    stages = load(ParallelismConfig(pipeline_model_parallel_size=2, tensor_model_parallel_size=2))
    assert [memory.loss_layer_bytes(stages, stage) for stage in (0, 1)] == [0, 64 * 256 * (2 + 4) * 2]
    large = replace(load(), tokens=8192, shape=replace(SHAPE, vocab_size=2**17))
    plain, fused = memory.loss_layer_bytes(large, 0), memory.loss_layer_bytes(replace(large, fused_loss=True), 0)
    assert fused < plain / 50


def test_the_cache_is_keys_and_values_of_every_row_and_layer():
    found = load(ParallelismConfig(tensor_model_parallel_size=2), generation_rows=10, cached_positions=1000)
    a_layer = 10 * 100 * 2 * SHAPE.key_width // 2 * 2
    assert memory.generation_bytes(found, 0) == (SHAPE.num_layers + 1) * a_layer + 2 * 4 * 10 * SHAPE.vocab_size
    assert memory.generation_bytes(load(), 0) == 0
    on_cpu = replace(found, cpu=True)  # where the cache of a bf16 model is in fp32
    assert memory.generation_bytes(on_cpu, 0) - memory.generation_bytes(found, 0) == (SHAPE.num_layers + 1) * a_layer


@pytest.mark.parametrize("rows", [1, 10_000])
def test_the_total_counts_training_or_generation_whichever_is_larger(rows: int):
    parts = stage_memory(load(generation_rows=rows, cached_positions=64 * rows), 0)
    assert dict(parts.items())["loss layer"] == parts.loss_layer
    training = parts.activations + parts.loss_layer
    assert (training > parts.generation) is (rows == 1)
    held = parts.weights + parts.gradients + parts.optimizer + parts.reference + max(training, parts.generation)
    assert parts.total == held + parts.overhead
    assert parts.overhead == memory.OVERHEAD + round(memory.FRAGMENTATION * held)
