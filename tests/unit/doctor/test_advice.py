"""What is proposed to a config that does not fit: enough together, the cheapest kinds first, settings that exist."""

import pytest

from nemo_edo.config import RunConfig
from nemo_edo.configuration import compose_incomplete
from nemo_edo.doctor.advice import advise, fullest
from nemo_edo.doctor.workload import micro_batch_tokens, model_shape, trainings, workloads

GB = 10**9


def config(*overrides: str, name: str = "grpo_gsm8k") -> RunConfig:
    return compose_incomplete(name, list(overrides))[0]


def advice_for(*overrides: str, gpus: int, limit: int = 80 * GB, name: str = "grpo_gsm8k"):
    cfg = config(*overrides, name=name)
    return advise(cfg, model_shape(cfg), gpus, limit)


def overrides_of(advice) -> list[str]:
    return [override for change in advice.changes for override in change.overrides]


def test_nothing_is_proposed_to_what_fits():
    advice = advice_for("model=qwen2_5_0_5b", "parallelism=dp_sharded", "generation.max_batch_size=64", gpus=8)
    assert advice.changes == [] and advice.bytes < 80 * GB


@pytest.mark.parametrize(("model", "gpus", "name"), [
    ("qwen2_5_7b", 8, "grpo_gsm8k"), ("llama3_1_70b", 64, "idpo_gsm8k"), ("qwen3_32b", 16, "dapo_gsm8k"),
])
def test_the_overrides_compose_and_give_the_memory_that_is_promised(model: str, gpus: int, name: str):
    advice = advice_for(f"model={model}", gpus=gpus, name=name)
    assert advice.changes and advice.bytes <= 80 * GB
    changed = config(f"model={model}", *overrides_of(advice), name=name)
    assert fullest(changed, model_shape(changed), gpus).total == advice.bytes


def test_free_changes_stand_before_expensive_ones_and_expensive_ones_only_where_needed():
    some = overrides_of(advice_for("model=qwen2_5_7b", gpus=8))
    assert some == ["parallelism.use_distributed_optimizer=true", "parallelism.sequence_parallel=true"]
    more = overrides_of(advice_for("model=llama3_1_70b", gpus=8))
    assert more[:2] == some
    assert {"parallelism.recompute_granularity=full", "parallelism.optimizer_offload_fraction=1.0"} <= set(more)


def test_adapters_are_the_last_resort():
    advice = advice_for("model=qwen2_5_7b", "parallelism=single", gpus=1, limit=24 * GB)
    assert overrides_of(advice)[-1] == "lora.rank=16"


def test_what_cannot_fit_is_said_with_the_best_that_can_be_had():
    advice = advice_for("model=llama3_1_70b", "parallelism=single", gpus=1, limit=24 * GB)
    assert advice.bytes > 24 * GB


def test_micro_batches_of_pairs_keep_room_for_a_pair():
    advice = advice_for("model=qwen3_32b", "parallelism=tp8_sp", gpus=8, limit=30 * GB, name="idpo_gsm8k")
    assert "idpo.micro_batch_tokens=8192" in overrides_of(advice)


# --- the trainings of a config --------------------------------------------------------------------------------------


def test_trainings_are_the_warm_up_and_every_arm():
    assert list(trainings(config(name="quickstart"))) == ["sft", "grpo", "ed_grpo", "ed_grpo_floor", "entropy_bonus"]
    assert list(trainings(config("sft.steps=0", "~arms", name="quickstart"))) == ["policy"]


@pytest.mark.parametrize(("settings", "tokens"), [
    ({}, 8 * 64), ({"micro_batch_size": 2}, 2 * 64), ({"micro_batch_tokens": 100}, 100),
    ({"micro_batch_tokens": 1000}, 8 * 64), ({"micro_batch_tokens": 1000, "packing": "true"}, 1000),
])
def test_a_micro_batch_has_as_many_tokens_as_its_bounds_allow(settings: dict, tokens: int):
    overrides = [f"grpo.{name}={value}" for name, value in {"micro_batch_size": 8, **settings}.items()]
    cfg = config("~arms", *overrides, name="quickstart")
    assert micro_batch_tokens(cfg, cfg.grpo) == tokens


@pytest.mark.parametrize(("overrides", "where"), [
    ([], "host"), (["grpo.reference_placement=resident"], "resident"), (["grpo.beta=0"], "none"),
    (["lora.rank=2"], "none"), (["lora.rank=2", "grpo.reference=ema"], "host"),
])
def test_a_reference_is_counted_where_there_is_a_copy(overrides: list[str], where: str):
    cfg = config("~arms", "sft.steps=0", *overrides, name="quickstart")
    [load] = workloads(cfg, model_shape(cfg), 1).values()
    assert load.reference == where


@pytest.mark.parametrize(("model", "head", "fused"), [("qwen2_5_7b", "auto", True), ("qwen2_5_7b", "logits", False),
                                                      ("tiny_llama", "auto", False), ("tiny_llama", "fused", True)])
def test_the_loss_layer_is_the_one_that_will_be_chosen(model: str, head: str, fused: bool):
    cfg = config(f"model={model}", f"model.loss_head={head}", "model.seq_length=1024")
    assert all(load.fused_loss is fused for load in workloads(cfg, model_shape(cfg), 8).values())
