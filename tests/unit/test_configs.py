"""Every shipped configuration composes, and says what its name promises."""

from __future__ import annotations

import pytest

from nemo_edo.configuration import arm_configs, compose_run, shipped_config_dir

CONFIGS = sorted(path.stem for path in shipped_config_dir().glob("*.yaml"))
CHOICES = sorted(str(path.relative_to(shipped_config_dir()).with_suffix(""))
                 for path in shipped_config_dir().glob("*/*.yaml"))
MANDATORY = ["model.path=/models/policy", "data.train=/data/train.jsonl", "data.test=/data/test.jsonl"]


def overrides_for(config_name: str) -> list[str]:
    return [] if config_name == "quickstart" else MANDATORY


@pytest.mark.parametrize("config_name", CONFIGS)
def test_shipped_config_composes_under_its_own_name(config_name: str):
    cfg = compose_run(config_name, overrides_for(config_name))
    assert cfg.name == config_name
    assert "grpo" in arm_configs(cfg)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes_onto_the_quickstart(choice: str):
    group, name = choice.split("/")
    needed = {"model/hf": MANDATORY[:1], "data/gsm8k": MANDATORY[1:]}.get(choice, [])
    compose_run("quickstart", [f"{group}={name}", *needed])


def test_a_choice_sets_what_its_name_says():
    cfg = compose_run("quickstart", ["precision=bf16", "parallelism=tp2_pp2"])
    splits = cfg.parallelism.tensor_model_parallel_size, cfg.parallelism.pipeline_model_parallel_size
    assert (cfg.precision.dtype, splits) == ("bf16", (2, 2))
    assert compose_run("quickstart", ["parallelism=dp_sharded"]).parallelism.use_distributed_optimizer


def test_quickstart_arms_have_the_exploration_weights_of_the_study():
    arms = arm_configs(compose_run("quickstart", []))
    weights = {name: arm.exploration_weight for name, arm in arms.items()}
    assert weights == pytest.approx({"grpo": 0, "ed_grpo": 1e-6, "ed_grpo_floor": 0.3, "entropy_bonus": 0})
    assert (arms["ed_grpo_floor"].log_ratio_floor, arms["entropy_bonus"].entropy_coefficient) == (-0.1, 0.03)
    assert [arm.log_ratio_floor for name, arm in arms.items() if name != "ed_grpo_floor"] == [None] * 3


def test_quickstart_alpha_on_the_command_line_changes_only_the_arm_without_its_own():
    before, after = (arm_configs(compose_run("quickstart", line)) for line in ([], ["grpo.alpha=0.01"]))
    assert {name for name in before if before[name].alpha != after[name].alpha} == {"ed_grpo"}
    assert after["ed_grpo"].alpha == 0.01


def test_grpo_gsm8k_resolves_to_the_papers_numbers():
    cfg = compose_run("grpo_gsm8k", MANDATORY)
    ed_grpo = arm_configs(cfg)["ed_grpo"]
    assert (cfg.sampling.samples_per_prompt, cfg.sampling.temperature, ed_grpo.iterations) == (10, 1.0, 3)
    assert (ed_grpo.minibatch_size, ed_grpo.exploration_weight) == (512, pytest.approx(1e-3 * 0.04))
    assert (ed_grpo.beta, ed_grpo.optimizer.lr, ed_grpo.log_ratio_floor, cfg.sft.steps) == (0.04, 1e-6, None, 0)
    assert (cfg.evaluation.samples, cfg.evaluation.rollouts) == (10, 3)
