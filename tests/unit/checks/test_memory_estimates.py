"""What the memory estimates add up to, how a config becomes what they count, and what is proposed to one that does not
fit: enough together, the cheapest kinds first, settings that exist. docs/models.md has them for every model; weights,
gradients and optimizer state of real models are compared in unit/megatron.
"""

import math
from dataclasses import replace

import pytest

from nemo_edo.checks import memory
from nemo_edo.checks.advice import advise
from nemo_edo.checks.memory import Workload, for_estimate, fullest, model_shape, stage_memory, workloads
from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig, RunConfig
from nemo_edo.config.compose import compose_incomplete
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
    alike = stage_memory(load(ParallelismConfig(context_parallel_size=2), data_parallel=3), 0)
    assert alike.optimizer == 12 * SHAPE.parameters
    assert alike.checkpoint == 14 * SHAPE.parameters  # with the weights in bf16
    parallelism = ParallelismConfig(use_distributed_optimizer=True, optimizer_offload_fraction=0.75)
    offloaded = stage_memory(load(parallelism), 0)
    assert (offloaded.optimizer, offloaded.host) == (3 * SHAPE.parameters, 9 * SHAPE.parameters)


EXPERTS = replace(SHAPE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48)


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


GB = 10**9


def config(*overrides: str, name: str = "grpo_gsm8k") -> RunConfig:
    base = ["replicate_baseline=false"] if name == "quickstart" else ["parallelism=tp4", "model.seq_length=4096"]
    return compose_incomplete(name, [*base, *overrides])[0]


@pytest.mark.parametrize(("model", "gpus", "name"), [
    ("qwen2_5_7b", 8, "grpo_gsm8k"), ("llama3_1_70b", 64, "idpo_gsm8k"), ("qwen3_32b", 16, "dapo_gsm8k"),
])
def test_the_overrides_compose_and_give_the_memory_that_is_promised(model: str, gpus: int, name: str):
    cfg = config(f"model={model}", name=name)
    changes, needed = advise(cfg, model_shape(cfg), gpus, 80 * GB)
    overrides = [f"{key}={str(value).lower()}" for made in changes.values() for key, value in made.items()]
    assert overrides and needed <= 80 * GB
    changed = config(f"model={model}", *overrides, name=name)
    assert fullest(changed, model_shape(changed), gpus).total == needed


@pytest.mark.parametrize(("settings", "processes", "train", "test", "rows"), [
    ([], 1, 1280, 256, 640),  # as many as may be: an evaluation has 30 responses to each problem
    ([], 1, 1280, 4, 640),  # a collection has 128 problems, 10 responses to each
    (["grpo.problems_per_iteration=5"], 8, 1280, 4, 15), ([], 1, 4, 1, 40),
    (["generation.part_size=100"], 2, 1280, 256, 50), ([], 1, math.inf, math.inf, 640),
])
def test_no_more_sequences_are_decoded_at_a_time_than_there_are_responses_to_generate(
        settings, processes, train, test, rows):
    found = for_estimate(config(*settings, name="quickstart"), processes, train=train, test=test)
    assert found.generation.max_batch_size == rows


@pytest.mark.parametrize(("settings", "cpu", "processes", "tested", "positions"), [
    ([], False, 1, 256, 640 * 64), (["model.attention=local"], True, 1, 256, 640 * 64),
    ([], True, 1, 256, 640 * 32 + 64 * 32),  # ten responses to each of 64 prompts; fewer greedy responses than that
    ([], True, 1, 500, 500 * 64), ([], True, 1, math.inf, 640 * 64), ([], True, 4, 1280, 640 * 32 + 320 * 32),
    (["sampling.samples_per_prompt=2"], True, 2, 4, 640 * 64),  # a rank has one response to each prompt
])
def test_on_a_cpu_the_responses_to_a_prompt_share_its_place_in_the_cache(settings, cpu, processes, tested, positions):
    cfg = config(*settings, name="quickstart")
    shape = model_shape(cfg)
    found = {load.cached_positions for load in workloads(cfg, shape, processes, cpu=cpu, tested=tested).values()}
    assert found == {positions}


SMOLLM2 = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
           "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}


@pytest.mark.parametrize(("group", "response", "longest", "settings", "measured"), [
    (4, 128, 202, ["grpo.micro_batch_size=4", "model.seq_length=256"], 5.18),
    (8, 256, 330, ["grpo.problems_per_iteration=2"], 6.95), (4, 128, 202, ["grpo.micro_batch_tokens=1024"], 5.08),
    (16, 64, 138, ["grpo.micro_batch_size=2", "grpo.problems_per_iteration=8"], 4.20),
])
def test_a_real_models_estimate_is_within_a_third_of_the_peak_that_was_measured_on_a_cpu(
        group, response, longest, settings, measured):
    """GRPO on SmolLM2-135M-Instruct in fp32, 16 training problems, 4 test problems with 2 responses to each."""
    shape = ModelShape.from_hf(SMOLLM2, "SmolLM2")
    cfg = config("~arms", "parallelism=single", "precision=fp32", "model.seq_length=null", "evaluation.samples=2",
                 "grpo.problems_per_iteration=4", "evaluation.rollouts=1", f"sampling.samples_per_prompt={group}",
                 f"sampling.max_new_tokens={response}", *settings)
    cfg = for_estimate(cfg, 1, longest=longest, train=16, test=4)
    assert measured / 1.1 < fullest(cfg, shape, 1, cpu=True, tested=4).total / GB < 1.3 * measured


def test_auto_counts_the_rows_that_have_room_beside_the_weights_and_one_at_least():
    settings = ("model=qwen2_5_7b", "parallelism=tp2_sharded", "grpo.micro_batch_tokens=8192")
    shape, known = model_shape(config(*settings)), {"rows": 300}

    def rows(limit: int) -> int:
        return memory.with_rows_that_fit(config(*settings), shape, 8, limit, **known).generation.max_batch_size

    def needed(number: int) -> int:
        cfg = config(*settings, f"generation.max_batch_size={number}")
        [found] = memory.largest(workloads(cfg, shape, 8))[1]
        return found.generating

    assert [rows(needed(number)) for number in (2, 64, 300, 400)] == [2, 64, 300, 300]
    assert [rows(needed(64) - 1), rows(needed(1) - 1), rows(0)] == [63, 1, 1]
