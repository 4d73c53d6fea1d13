"""What is proposed to a config that does not fit: enough together, the cheapest kinds first, settings that exist."""

import math

import pytest

from nemo_edo.checks.advice import advise
from nemo_edo.checks.workload import (
    for_estimate,
    fullest,
    largest,
    micro_batch_tokens,
    model_shape,
    with_rows_that_fit,
    workloads,
)
from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_incomplete
from nemo_edo.config.model_shape import ModelShape

GB = 10**9


def config(*overrides: str, name: str = "grpo_gsm8k") -> RunConfig:
    base = ["replicate_baseline=false"] if name == "quickstart" else ["parallelism=tp4", "model.seq_length=4096"]
    return compose_incomplete(name, [*base, *overrides])[0]


def advice_for(*overrides: str, gpus: int, limit: int = 80 * GB, name: str = "grpo_gsm8k") -> tuple[list[str], int]:
    """The overrides, and the bytes that are needed with them."""
    cfg = config(*overrides, name=name)
    changes, needed = advise(cfg, model_shape(cfg), gpus, limit)
    return [f"{key}={str(value).lower()}" for made in changes.values() for key, value in made.items()], needed


@pytest.mark.parametrize(("model", "gpus", "name"), [
    ("qwen2_5_7b", 8, "grpo_gsm8k"), ("llama3_1_70b", 64, "idpo_gsm8k"), ("qwen3_32b", 16, "dapo_gsm8k"),
])
def test_the_overrides_compose_and_give_the_memory_that_is_promised(model: str, gpus: int, name: str):
    overrides, needed = advice_for(f"model={model}", gpus=gpus, name=name)
    assert overrides and needed <= 80 * GB
    changed = config(f"model={model}", *overrides, name=name)
    assert fullest(changed, model_shape(changed), gpus).total == needed


@pytest.mark.parametrize(("settings", "processes", "train", "test", "rows"), [
    ([], 1, 1280, 256, 640),  # as many as may be: an evaluation has 30 responses to each problem
    ([], 1, 1280, 4, 640),  # a collection has 128 problems, 10 responses to each
    (["grpo.problems_per_iteration=5"], 1, 1280, 4, 120), (["grpo.problems_per_iteration=5"], 8, 1280, 4, 15),
    ([], 1, 4, 1, 40), (["generation.part_size=100"], 2, 1280, 256, 50), ([], 1, math.inf, math.inf, 640),
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
    (8, 256, 330, ["grpo.problems_per_iteration=2"], 6.95),
    (4, 128, 202, ["grpo.micro_batch_tokens=1024"], 5.08),
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


@pytest.mark.parametrize(("settings", "tokens"), [
    ({}, 8 * 64), ({"micro_batch_size": 2}, 2 * 64), ({"micro_batch_tokens": 100}, 100),
    ({"micro_batch_tokens": 1000}, 8 * 64), ({"micro_batch_tokens": 1000, "packing": "true"}, 1000),
])
def test_a_micro_batch_has_as_many_tokens_as_its_bounds_allow(settings: dict, tokens: int):
    overrides = [f"grpo.{name}={value}" for name, value in {"micro_batch_size": 8, **settings}.items()]
    cfg = config("~arms", *overrides, name="quickstart")
    assert micro_batch_tokens(cfg, cfg.grpo) == tokens


def test_auto_counts_the_rows_that_have_room_beside_the_weights_and_one_at_least():
    settings = ("model=qwen2_5_7b", "parallelism=tp2_sharded", "grpo.micro_batch_tokens=8192")
    shape, known = model_shape(config(*settings)), {"rows": 300}

    def rows(limit: int) -> int:
        return with_rows_that_fit(config(*settings), shape, 8, limit, **known).generation.max_batch_size

    def needed(number: int) -> int:
        cfg = config(*settings, f"generation.max_batch_size={number}")
        [memory] = largest(workloads(cfg, shape, 8))[1]
        return memory.generating

    assert [rows(needed(number)) for number in (2, 64, 300, 400)] == [2, 64, 300, 300]
    assert [rows(needed(64) - 1), rows(needed(1) - 1), rows(0)] == [63, 1, 1]
