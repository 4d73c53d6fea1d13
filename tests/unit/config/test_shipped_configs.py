"""Every shipped configuration composes, and says what its name promises."""

from dataclasses import replace

import pytest
import yaml

from nemo_edo.config import GRPOLossConfig
from nemo_edo.config.compose import ConfigError, arm_configs, compose_job, compose_run
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.losses import dapo_config, dr_grpo_config, gspo_config

JOBS = {"reward_model", "reward_model_arithmetic", "score"}
"""Configs of other jobs than a run."""
CONFIGS = sorted({path.stem for path in shipped_config_dir().glob("*.yaml")} - JOBS)
CHOICES = sorted(str(path.relative_to(shipped_config_dir()).with_suffix(""))
                 for path in shipped_config_dir().glob("*/*.yaml") if path.parent.name not in ("study", "studies"))
MANDATORY = ["model.path=/models/policy", "data.train=/data/train.jsonl", "data.test=/data/test.jsonl"]


BUILT_IN = {"quickstart", "alpha_sweep", "idpo_quickstart", "idpo_alpha_sweep", "rivals", "sft_quickstart"}
WITHOUT_BASELINE = {"alpha_sweep", "idpo_alpha_sweep", "sft_gsm8k", "sft_quickstart", "evaluate", "search"}
"""A sweep's baseline is another run; supervised training, or none, has no arms."""


@pytest.mark.parametrize("config_name", CONFIGS)
def test_shipped_config_composes_under_its_own_name(config_name: str):
    needed = [] if config_name in BUILT_IN else MANDATORY[:1] if config_name == "real" else MANDATORY
    cfg = compose_run(config_name, needed)
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


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not choice.startswith("arm/")])
def test_every_choice_of_every_group_composes_onto_the_quickstart(choice: str):
    group, name = choice.split("/")
    pretrained = group == "model" and name != "tiny_llama"
    if choice == "generation/openai":  # which trains nothing
        evaluated = compose_run("evaluate", ["model.path=/m", "data.test=/t", choice.replace("/", "="),
                                             "generation.servers.urls=[http://node7:8000]"])
        assert evaluated.generation.is_served
        return
    made = {"arithmetic": [], "source": ["data.source=a:b"], "reasoning_gym": ["data.source_args.name=ab"]}
    needed = MANDATORY[:1] if pretrained else made.get(name, MANDATORY[1:]) if group == "data" else []
    compose_run("quickstart", [f"{group}={name}", *needed])


def test_quickstart_arms_have_the_exploration_factors_of_the_study_and_one_follows_grpo_alpha():
    arms, swept = (arm_configs(compose_run("quickstart", ["replicate_baseline=false", *line]))
                   for line in ([], ["grpo.alpha=0.01"]))
    weights = {name: arm.exploration_weight for name, arm in arms.items()}
    assert weights == pytest.approx({"grpo": 0, "ed_grpo": 1e-6, "ed_grpo_floor": 0.3, "entropy_bonus": 0})
    assert (arms["ed_grpo_floor"].log_ratio_floor, arms["entropy_bonus"].entropy_coefficient) == (-0.1, 0.03)
    assert [arm.log_ratio_floor for name, arm in arms.items() if name != "ed_grpo_floor"] == [None] * 3
    assert swept == {**arms, "ed_grpo": replace(arms["ed_grpo"], alpha=0.01)}
    [(name, arm)] = arm_configs(compose_run("alpha_sweep", ["grpo.alpha=0.1"])).items()
    assert (name, arm.exploration_weight) == ("policy", pytest.approx(1e-4))


@pytest.mark.parametrize(("name", "of_library", "own"), [
    ("dapo", dapo_config(), set()),
    ("dr_grpo", dr_grpo_config(8), {"norm_length"}),
    ("gspo", gspo_config(), {"clip_low", "clip_high"}),  # a range for the built-in task's short responses
])
def test_an_arm_and_the_librarys_settings_of_one_method_agree(name: str, of_library: GRPOLossConfig, own: set[str]):
    """The arm of conf/arm/ changes a run's grpo section, and what it leaves open is the run's."""
    text = (shipped_config_dir() / "arm" / f"{name}.yaml").read_text(encoding="utf-8")
    arm = {key: value for key, value in yaml.safe_load(text)[name].items() if key in vars(of_library)}
    plain = GRPOLossConfig(alpha=0.0, beta=0.0, norm_length=of_library.norm_length)
    changed = {key for key, value in vars(of_library).items() if value != getattr(plain, key)}
    assert {key: value for key, value in vars(of_library).items() if key in {*arm, *changed} - own} == {
        key: value for key, value in arm.items() if key not in own}
