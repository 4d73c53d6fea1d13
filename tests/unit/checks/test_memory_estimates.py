"""The memory estimates' formulas: what they add up to, and how splits and recomputation change them.

Weights, gradients and optimizer state of real models are compared in unit/megatron.
"""

from dataclasses import replace

import pytest

from nemo_edo.checks import estimates as memory
from nemo_edo.checks.estimates import Workload, stage_memory
from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.model_shape import ModelShape

SHAPE = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=4,
                   kv_channels=16, vocab_size=512, tied=False, qkv_bias=True, qk_norm=False)
BF16 = PrecisionConfig("bf16")


def load(parallelism: ParallelismConfig | None = None, shape: ModelShape = SHAPE, **changes) -> Workload:
    settings = {"precision": BF16, "lora": LoRAConfig(), "data_parallel": 1, "tokens": 64, **changes}
    return Workload(shape=shape, parallelism=parallelism or ParallelismConfig(), **settings)


def test_the_distributed_optimizer_splits_its_state_over_data_and_context_ranks_and_may_move_it_to_the_host():
    sharded = ParallelismConfig(use_distributed_optimizer=True, context_parallel_size=2)
    assert stage_memory(load(sharded, data_parallel=3), 0).optimizer == pytest.approx(2 * SHAPE.parameters, rel=1e-3)
    alike = load(ParallelismConfig(context_parallel_size=2), data_parallel=3)
    assert stage_memory(alike, 0).optimizer == 12 * SHAPE.parameters
    offloaded = load(ParallelismConfig(use_distributed_optimizer=True, optimizer_offload_fraction=0.75))
    found = stage_memory(offloaded, 0).optimizer, stage_memory(offloaded, 0).host
    assert found == (3 * SHAPE.parameters, 9 * SHAPE.parameters)


EXPERTS = replace(SHAPE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48)
OF_ALL_LAYERS = 8 * 8 * 3 * 48 * 64
"""Layers, experts, matrices of each, width, hidden size."""


def test_the_distributed_optimizer_splits_experts_over_the_ranks_that_have_the_same():
    sharded = ParallelismConfig(expert_model_parallel_size=4, use_distributed_optimizer=True)
    rest = EXPERTS.parameters - OF_ALL_LAYERS
    expected = 12 * (rest / 8 + OF_ALL_LAYERS / 4 / 2)
    assert stage_memory(load(sharded, EXPERTS, data_parallel=8), 0).optimizer == pytest.approx(expected, abs=24)


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
    kept = [stage_memory(whole, stage).activations - layer for stage in range(stages)]
    assert kept == [(stages - stage) * SHAPE.num_layers // stages * layer for stage in range(stages)]


def test_interleaving_keeps_more_by_the_share_of_korthikanti_et_al():
    """1 + (p - 1) / (p v) of the layers on the first of p stages with v chunks: their section 4.2.3."""
    pipeline, virtual = 4, 2
    found = load(ParallelismConfig(pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual))
    layer = memory.layer_activation_bytes(found)
    kept = stage_memory(found, 0).activations - layer
    assert kept == pytest.approx(SHAPE.num_layers * layer * (1 + (pipeline - 1) / (pipeline * virtual)))


def test_logits_are_the_last_stages_and_a_fused_loss_holds_a_block_of_them():
    stages = load(ParallelismConfig(pipeline_model_parallel_size=2, tensor_model_parallel_size=2))
    assert [stage_memory(stages, stage).loss_layer for stage in (0, 1)] == [0, 64 * 256 * (2 + 4) * 2]
    large = replace(load(), tokens=8192, shape=replace(SHAPE, vocab_size=2**17))
    plain, fused = stage_memory(large, 0).loss_layer, stage_memory(replace(large, fused_loss=True), 0).loss_layer
    assert fused < plain / 50


def test_the_cache_is_keys_and_values_of_every_row_and_layer():
    found = load(ParallelismConfig(tensor_model_parallel_size=2), generation_rows=10, cached_positions=1000)
    a_layer = 10 * 100 * 2 * SHAPE.key_width // 2 * 2
    assert stage_memory(found, 0).generation == (SHAPE.num_layers + 1) * a_layer + 2 * 4 * 10 * SHAPE.vocab_size
    assert stage_memory(load(), 0).generation == 0
    on_cpu = replace(found, cpu=True)  # where the cache of a bf16 model is in fp32
    assert stage_memory(on_cpu, 0).generation - stage_memory(found, 0).generation == (SHAPE.num_layers + 1) * a_layer
