"""Every shipped configuration composes, and says what its name promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_edo.config import GRPOConfig, IDPOConfig
from nemo_edo.configuration import ConfigError, arm_configs, compose_job, compose_run, shipped_config_dir

JOBS = {"reward_model", "reward_model_arithmetic", "score"}
"""Configs of other jobs than a run."""
CONFIGS = sorted({path.stem for path in shipped_config_dir().glob("*.yaml")} - JOBS)
CHOICES = sorted(str(path.relative_to(shipped_config_dir()).with_suffix(""))
                 for path in shipped_config_dir().glob("*/*.yaml"))
MANDATORY = ["model.path=/models/policy", "data.train=/data/train.jsonl", "data.test=/data/test.jsonl"]


BUILT_IN = {"quickstart", "alpha_sweep", "idpo_quickstart", "idpo_alpha_sweep", "rivals", "sft_quickstart"}
WITHOUT_BASELINE = {"alpha_sweep", "idpo_alpha_sweep", "sft_gsm8k", "sft_quickstart", "evaluate", "search"}
"""A sweep's baseline is another run; supervised training, or none, has no arms."""
SETS = {"alphas", "quickstart", "controls", "rivals", "baselines", "idpo"}
"""Files of the group ``arm`` that name several others."""


def overrides_for(config_name: str) -> list[str]:
    return [] if config_name in BUILT_IN else MANDATORY


def arms_of(*overrides: str) -> dict:
    return arm_configs(compose_run("quickstart", list(overrides)))


@pytest.mark.parametrize("config_name", CONFIGS)
def test_shipped_config_composes_under_its_own_name(config_name: str):
    cfg = compose_run(config_name, overrides_for(config_name))
    assert cfg.name == config_name
    has_baseline = [arm.exploration_weight == 0 for arm in arm_configs(cfg).values()]
    assert any(has_baseline) != (config_name in WITHOUT_BASELINE)


@pytest.mark.parametrize("config_name", sorted(JOBS))
def test_shipped_config_of_another_job_composes_as_that_and_not_as_a_run(config_name: str):
    given = [] if config_name == "score" else ["model.path=/models/base", "data.run=/runs/quickstart"]
    cfg = compose_job(config_name, given)
    assert config_name.startswith(cfg.job) and getattr(cfg, "name", config_name) == config_name
    with pytest.raises(ConfigError, match=f"{config_name} is the config of another job .job: {cfg.job}., not of a run"):
        compose_run(config_name, given)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes_onto_the_quickstart(choice: str):
    group, name = choice.split("/")
    key = "arms" if group == "arm" else group
    pretrained = group == "model" and name != "tiny_llama"
    needed = MANDATORY[:1] if pretrained else MANDATORY[1:] if group == "data" and name != "arithmetic" else []
    compose_run("quickstart", [f"{key}={name}", *needed])


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


def test_dapo_gsm8k_has_dapos_clips_and_buffer_beside_grpo():
    cfg = compose_run("dapo_gsm8k", MANDATORY)
    arms = arm_configs(cfg)
    dapo = arms["dapo"]
    assert list(arms) == ["grpo", "dapo"]
    assert (dapo.clip_low, dapo.clip_high, dapo.beta, dapo.aggregation) == (0.2, 0.28, 0, "token-mean")
    assert (dapo.dynamic_sampling, dapo.overlong_buffer) == (True, cfg.sampling.max_new_tokens // 5)


def test_idpo_gsm8k_resolves_to_the_papers_numbers():
    arms = arm_configs(compose_run("idpo_gsm8k", MANDATORY))
    assert {name: type(arm) for name, arm in arms.items()} == {"eto": IDPOConfig, "ed_idpo": IDPOConfig}
    assert [arms[name].exploration_weight for name in arms] == [0, pytest.approx(1e-3 * 0.1)]
    assert [(arm.minibatch_size, arm.optimizer.lr, arm.iterations) for arm in arms.values()] == [(256, 5e-7, 3)] * 2


def test_alpha_sweep_trains_one_policy_that_follows_grpo_alpha():
    arms = arm_configs(compose_run("alpha_sweep", ["grpo.alpha=0.1"]))
    assert {name: arm.exploration_weight for name, arm in arms.items()} == {"policy": pytest.approx(1e-4)}


# --- arms by name -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [choice.partition("/")[2] for choice in CHOICES if choice.startswith("arm/")])
def test_arm_of_a_name_is_the_one_arm_of_its_file(name: str):
    assert list(arms_of(f"arms={name}")) == [name] or name in SETS


@pytest.mark.parametrize("name", sorted(SETS))
def test_set_of_arms_has_a_baseline_first(name: str):
    arms = arms_of(f"arms={name}")
    assert len(arms) > 2
    assert next(iter(arms)) in ("grpo", "eto")


def test_sets_and_single_arms_can_be_listed_together_and_an_arm_stands_once():
    assert list(arms_of("arms=[controls,quickstart,kl_cov]")) == [
        "grpo", "ed_grpo_floor", "noise", "no_zero_advantage", "entropy_bonus", "ed_grpo", "kl_cov"]


def test_an_arm_named_in_a_run_of_another_algorithm_keeps_its_own():
    arms = arm_configs(compose_run("idpo_quickstart", ["arms=[eto,ed_grpo,noise]"]))
    assert [type(arm) for arm in arms.values()] == [IDPOConfig, GRPOConfig, GRPOConfig]


def test_arms_control_one_thing_each():
    """The controls share the strength of the arm that they are controls for."""
    arms = arms_of("arms=controls")
    floor = arms["ed_grpo_floor"]
    assert floor.exploration_weight == pytest.approx(0.3)
    assert arms["noise"] == replace(floor, exploration_control="noise")
    assert arms["no_zero_advantage"] == replace(floor, explore_uninformative_groups=False)


def test_the_two_of_ours_together_are_both():
    arms = arms_of("arms=rivals")
    assert arms["pass4_novelty"] == replace(arms["pass4"], novelty_strength=arms["novelty"].novelty_strength)
