"""Composition: Hydra's syntax works, values are typed, and each mistake is one line that says what and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_edo.config import GRPOConfig, IDPOConfig, RunConfig
from nemo_edo.configuration import ConfigError, arm_configs, compose_run, resolved_yaml


def write_configs(folder: Path, **files: str) -> Path:
    """``group__name`` becomes group/name.yaml."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def message_of(config_name: str, overrides: list[str], config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_run(config_name, overrides, config_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what works ---------------------------------------------------------------------------------------------------


def test_override_of_a_key_that_no_file_sets_reaches_the_run_config():
    assert compose_run("quickstart", ["grpo.clip_high=0.28"]).grpo.clip_high == 0.28


def test_unset_keys_keep_the_defaults_of_the_dataclasses():
    cfg, default = compose_run("quickstart", []), RunConfig.__dataclass_fields__["seed"].default
    assert (cfg.seed, cfg.grpo.clip_low, cfg.exp_manager) == (default, 0.2, {"create_tensorboard_logger": True})


@pytest.mark.parametrize(("line", "read", "expected"), [
    ("+grpo.clip_low=0.1", lambda cfg: cfg.grpo.clip_low, 0.1),
    ("++grpo.beta=0.5", lambda cfg: cfg.grpo.beta, 0.5),
    ("~grpo.beta", lambda cfg: cfg.grpo.beta, 0.04),
    ("~arms", lambda cfg: cfg.arms, {}),
    ("~arms.grpo", lambda cfg: "grpo" in cfg.arms, False),
    ('data.prompt="Q: {question}, A:"', lambda cfg: cfg.data.prompt, "Q: {question}, A:"),
    ("exp_manager.tags=[a,b]", lambda cfg: cfg.exp_manager["tags"], ["a", "b"]),
    ("grpo={beta: 0.5, optimizer: {lr: 0.25}}", lambda cfg: (cfg.grpo.beta, cfg.grpo.optimizer.lr), (0.5, 0.25)),
    ("grpo.beta=${grpo.clip_low}", lambda cfg: cfg.grpo.beta, 0.2),
    ("model.architecture.anything=7", lambda cfg: cfg.model.architecture["anything"], 7),
    ("threads=null", lambda cfg: cfg.threads, None),
])
def test_hydra_override_syntax_sets(line: str, read, expected):
    assert read(compose_run("quickstart", [line])) == expected


def test_the_last_of_two_overrides_wins():
    assert compose_run("quickstart", ["seed=1", "seed=2"]).seed == 2


def test_own_config_folder_takes_the_groups_that_it_lacks_from_the_shipped_ones(tmp_path: Path):
    folder = write_configs(tmp_path, mine="defaults: [{model: tiny_llama}, {data: own}, _self_]\n"
                                          "sampling: {max_new_tokens: 8}\nname: mine\n",
                           data__own="prompt: '<{question}>'\n")
    cfg = compose_run("mine", [], folder)
    assert (cfg.model.architecture["model_type"], cfg.data.prompt) == ("llama", "<{question}>")


def test_resolved_yaml_composes_to_the_same_run(tmp_path: Path):
    cfg = compose_run("quickstart", ["grpo.beta=${grpo.clip_low}", "threads=2", "data.prompt='{question}\n\tA: '"])
    write_configs(tmp_path, config=resolved_yaml(cfg))
    assert compose_run("config", [], tmp_path) == cfg


def test_resolved_yaml_holds_every_setting():
    written = OmegaConf.create(resolved_yaml(compose_run("quickstart", [])))
    assert set(written) == set(RunConfig.__dataclass_fields__)
    assert written.grpo.clip_low == 0.2


# --- arms -------------------------------------------------------------------------------------------------------------


def test_without_arms_there_is_one_policy_with_the_grpo_section():
    cfg = compose_run("quickstart", ["~arms"])
    assert arm_configs(cfg) == {"policy": cfg.grpo}


def test_without_arms_the_policy_has_the_section_of_the_runs_algorithm():
    cfg = compose_run("quickstart", ["~arms", "algorithm=idpo", "idpo.beta=0.3"])
    assert arm_configs(cfg) == {"policy": cfg.idpo}
    assert (cfg.idpo.beta, cfg.idpo.exploration_weight) == (0.3, pytest.approx(3e-4))


@pytest.mark.parametrize("line", ["arms=noise", "arms=[grpo,noise]", "+arms=[noise]"])
def test_arms_by_name_replace_those_that_the_config_names(line: str):
    assert list(compose_run("quickstart", [line]).arms) == (["grpo", "noise"] if "grpo" in line else ["noise"])


def test_arms_by_name_join_those_that_a_config_spells_out(tmp_path: Path):
    folder = write_configs(tmp_path, mine="defaults: [{model: tiny_llama}, _self_]\nsampling: {max_new_tokens: 8}\n"
                                          "arms: {own: {alpha: 3}}\n")
    assert list(compose_run("mine", ["arms=[grpo,noise]"], folder).arms) == ["own", "grpo", "noise"]


def test_an_arm_of_ones_own_folder_can_be_named(tmp_path: Path):
    write_configs(tmp_path, mine="defaults: [{model: tiny_llama}, {arm@arms: [grpo, bold]}, _self_]\n"
                                 "sampling: {max_new_tokens: 8}\n", arm__bold="bold: {alpha: 9}\n")
    assert compose_run("mine", [], tmp_path).arms == {"grpo": {"alpha": 0}, "bold": {"alpha": 9}}
    assert list(compose_run("mine", ["arms=bold"], tmp_path).arms) == ["bold"]


def test_an_arm_by_name_can_be_changed_beside():
    arms = compose_run("quickstart", ["arms.noise.alpha=7", "arms=[grpo,noise]", "~arms.grpo"]).arms
    assert [arm["alpha"] for arm in arms.values()] == [7]


def test_an_arm_of_the_runs_own_algorithm_does_not_repeat_it():
    assert compose_run("idpo_quickstart", ["arms=[ed_idpo,ed_grpo]"]).arms == {
        "ed_idpo": {}, "ed_grpo": {"algorithm": "grpo"}}


@pytest.mark.parametrize("line", ["arms=nois", "arms=[grpo,nois]"])
def test_unknown_arm_is_told_with_the_nearest_name(line: str):
    assert message_of("quickstart", [line]).startswith(
        f"command line: {line}: no config nois in group arm; did you mean noise? (there are: alphas, baselines, ")


def test_mistake_in_a_named_arm_is_placed_in_its_file():
    assert "(conf/arm/pass4.yaml:2)" in message_of("quickstart", ["arms=pass4", "sampling.samples_per_prompt=4"])


def test_arms_start_from_the_section_of_the_runs_algorithm_or_of_their_own():
    overrides = ["algorithm=idpo", "idpo.beta=0.3", "grpo.beta=0.7", "~arms",
                 "+arms={eto: {alpha: 0}, all: {}, dapo: {algorithm: grpo, clip_high: 0.28}}"]
    arms = arm_configs(compose_run("quickstart", overrides))
    assert {name: type(arm) for name, arm in arms.items()} == {"eto": IDPOConfig, "all": IDPOConfig, "dapo": GRPOConfig}
    assert {name: arm.beta for name, arm in arms.items()} == {"eto": 0.3, "all": 0.3, "dapo": 0.7}
    assert (arms["eto"].exploration_weight, arms["dapo"].clip_high) == (0, 0.28)


def test_supervised_training_alone_has_no_arms():
    assert arm_configs(compose_run("quickstart", ["~arms", "algorithm=sft"])) == {}
    for overrides, told in ((["algorithm=sft"], "arms is ['grpo'"), (["~arms", "algorithm=sft", "sft.steps=0"],
                                                                    "sft.steps is 0, expected a number above 0")):
        with pytest.raises(ConfigError, match=re.escape(told)):
            compose_run("quickstart", overrides)


@pytest.mark.parametrize("algorithm", ["grpo", "idpo"])
@pytest.mark.parametrize("name", ["new", "idpo", "grpo", "my_idpo"])
def test_a_bad_value_of_an_arm_is_told_with_the_arms_key_whatever_its_algorithm_and_name(algorithm: str, name: str):
    line = f"++arms.{name}={{algorithm: {algorithm}, beta: -1}}"
    expected = {"grpo": "a number of at least 0", "idpo": "a number above 0"}[algorithm]
    assert message_of("quickstart", ["~arms", line]) == (
        f"arms.{name}.beta is -1.0, expected {expected} (command line: {line})")


def test_a_controller_in_an_arm_without_exploration_is_told_at_the_start():
    message = message_of("quickstart", ["grpo.schedule.kind=gradient-share", "~arms", "+arms={a: {}, b: {alpha: 0}}"])
    assert message.startswith("arms.b.schedule.kind gradient-share starts from the exploration weight 0, expected one")


def test_an_arm_differs_from_the_grpo_section_only_in_its_own_keys():
    cfg = compose_run("quickstart", ["arms={new: {optimizer: {lr: 0.5}, clip_high: 0.28}}"])
    new = arm_configs(cfg)["new"]
    assert (new.optimizer.lr, new.clip_high, new.beta) == (0.5, 0.28, cfg.grpo.beta)
    assert new.optimizer.schedule == cfg.grpo.optimizer.schedule
    assert cfg.grpo.optimizer.lr != 0.5


def test_an_arm_replaces_the_sections_alpha_by_a_coefficient_only_with_alpha_null():
    overrides = ["grpo.alpha=0.5", "arms.new.exploration_coefficient=0.1"]
    message = message_of("quickstart", overrides)
    assert message.startswith("arms.new.alpha (0.5) and arms.new.exploration_coefficient (0.1) are both given")
    arms = arm_configs(compose_run("quickstart", [*overrides, "arms.new.alpha=null"]))
    assert arms["new"].exploration_weight == 0.1


@pytest.mark.parametrize(("differences", "expected"), [
    ({"alhpa": 1}, "unknown key arms.a.alhpa (arms.a); the nearest known key is arms.a.alpha"),
    ({"beta": "x"}, "arms.a.beta is 'x', expected a number (arms.a)"),
    ({"beta": -1}, "arms.a.beta is -1.0, expected a number of at least 0 (arms.a)"),
    ({"algorithm": "ppo"}, "arms.a.algorithm is 'ppo', expected one of grpo, idpo (arms.a)"),
    ({"algoritm": "idpo"}, "unknown key arms.a.algoritm (arms.a); the nearest known key is arms.a.algorithm"),
    ({"algorithm": "idpo", "clip_high": 0.3},
     "unknown key arms.a.clip_high (arms.a); the nearest known key is arms.a.alpha"),
    ({"algorithm": "idpo", "exploration_samples": "some"},
     "arms.a.exploration_samples is 'some', expected all, paired or a number above 0 (arms.a)"),
])
def test_arm_of_a_run_config_made_in_code_is_checked(differences: dict, expected: str):
    cfg = compose_run("quickstart", [])
    cfg.arms = {"a": differences}
    with pytest.raises(ConfigError) as caught:
        arm_configs(cfg)
    assert str(caught.value) == expected


# --- mistakes on the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "expected"), [
    ("grpo.alhpa=0.01", "unknown key grpo.alhpa (command line: grpo.alhpa=0.01); "
                        "the nearest known key is grpo.alpha"),
    ("grpo.lr=1", "unknown key grpo.lr (command line: grpo.lr=1); the nearest known key is grpo.optimizer.lr"),
    ("sft.foo=1", "unknown key sft.foo (command line: sft.foo=1); the nearest known key is sft.steps"),
    ("+sft.stepz=1", "unknown key sft.stepz (command line: +sft.stepz=1); the nearest known key is sft.steps"),
    ("dta=gsm8k", "unknown key dta (command line: dta=gsm8k); the nearest known key is data"),
    ("grpo={alhpa: 1}", "unknown key grpo.alhpa (command line: grpo={alhpa: 1}); "
                        "the nearest known key is grpo.alpha"),
    ("arms.ed_grpo.alhpa=1", "unknown key arms.ed_grpo.alhpa (command line: arms.ed_grpo.alhpa=1); "
                             "the nearest known key is arms.ed_grpo.alpha"),
    ("arms.ed_grpo.optimizer.rl=1", "unknown key arms.ed_grpo.optimizer.rl (command line: "
     "arms.ed_grpo.optimizer.rl=1); the nearest known key is arms.ed_grpo.optimizer.lr"),
    ("grpo.alpha=x", "grpo.alpha is 'x', expected a number or null (command line: grpo.alpha=x)"),
    ("grpo.iterations=2.5", "grpo.iterations is 2.5, expected an integer (command line: grpo.iterations=2.5)"),
    ("sft.steps=null", "sft.steps is None, expected an integer (command line: sft.steps=null)"),
    ("parallelism.use_distributed_optimizer=maybe", "parallelism.use_distributed_optimizer is 'maybe', expected true "
     "or false (command line: parallelism.use_distributed_optimizer=maybe)"),
    ("arms.ed_grpo.optimizer.lr=x", "arms.ed_grpo.optimizer.lr is 'x', expected a number "
                                    "(command line: arms.ed_grpo.optimizer.lr=x)"),
    ("arms.ed_grpo=3", "arms.ed_grpo is 3, expected a mapping (command line: arms.ed_grpo=3)"),
    ("grpo=3", "grpo is 3, expected a section with keys of its own (command line: grpo=3)"),
    ("exp_manager=3", "exp_manager is 3, expected a mapping (command line: exp_manager=3)"),
    ("grpo.beta=-1", "grpo.beta is -1.0, expected a number of at least 0 (command line: grpo.beta=-1)"),
    ("sft.optimizer.lr=0", "sft.optimizer.lr is 0.0, expected a number above 0 (command line: sft.optimizer.lr=0)"),
    ("arms.ed_grpo.optimizer.lr=0", "arms.ed_grpo.optimizer.lr is 0.0, expected a number above 0 "
                                    "(command line: arms.ed_grpo.optimizer.lr=0)"),
    ("grpo.beta=${nope}", "grpo.beta: Interpolation key 'nope' not found (command line: grpo.beta=${nope})"),
    ("grpo.beta=???", "a value is needed for grpo.beta (command line: grpo.beta=???); on the command line: KEY=VALUE"),
    ("data=gsm8q", "command line: data=gsm8q: no config gsm8q in group data; did you mean gsm8k? "
                   "(there are: aime24, aime25, arithmetic, gsm8k, gsm8k_paper, math, math500, minerva, "
                   "olympiadbench, s1k)"),
    ("algorithm=ppo", "algorithm is 'ppo', expected one of none, sft, grpo, idpo (command line: algorithm=ppo)"),
    ("idpo.micro_batch_size=3", "idpo.micro_batch_size is 3, expected an even number: a pair is two responses of one "
                                "pass (command line: idpo.micro_batch_size=3)"),
    ("idpo.micro_batch_tokens=100", "idpo.micro_batch_tokens is 100, expected null or at least 2 * model.seq_length = "
                                    "128 (command line: idpo.micro_batch_tokens=100)"),
    ("grpo.packing=true", "grpo.packing is True, expected false, or a number of grpo.micro_batch_tokens to a pack "
                          "(command line: grpo.packing=true)"),
    ("grpo.share_prompts=true", "grpo.share_prompts is True, expected false, or grpo.packing=true: prompts are shared "
                                "within packs (command line: grpo.share_prompts=true)"),
    ("grpo.old_logprobs=engine", "grpo.old_logprobs is 'engine', expected one of trainer, sampler (command line: "
                                 "grpo.old_logprobs=engine)"),
    ("model.attention=flash", "model.attention is 'flash', expected one of auto, te, sdpa, local "
                              "(command line: model.attention=flash)"),
    ("seed", "command line: seed: not of Hydra's form KEY=VALUE"),
    ("seed=1,2", "command line: seed=1,2: write a list as [a,b], quote a text with commas, or add -m for a sweep"),
    ("=3", "command line: =3: names no setting of a run"),
    ("hydra.run.dir=x", "command line: hydra.run.dir=x: names no setting of a run"),
])
def test_mistake_on_the_command_line_is_one_line_with_key_place_and_remedy(line: str, expected: str):
    assert message_of("quickstart", [line]) == expected


@pytest.mark.parametrize(("line", "names"), [
    ("+grpo.beta=1", ["grpo.beta", "++grpo.beta=1"]),
    ("~grpo.alhpa", ["grpo.alhpa", "does not exist"]),
    ("+data=gsm8k", ["data"]),
])
def test_hydras_own_refusals_stay_one_line_that_names_the_key(line: str, names: list[str]):
    message = message_of("quickstart", [line])
    assert all(name in message for name in names)


# --- mistakes in files ------------------------------------------------------------------------------------------------

BASE = "defaults: [{model: tiny_llama}, {data: own}, _self_]\nsampling: {max_new_tokens: 8}\n"


@pytest.mark.parametrize(("data", "primary", "expected"), [
    ("prompt: '{question}'\n\narithmetic:\n  max_operandd: 3\n", BASE,
     "unknown key data.arithmetic.max_operandd (FOLDER/data/own.yaml:4); "
     "the nearest known key is data.arithmetic.max_operand"),
    ("arithmetic:\n  seed: x\n", BASE,
     "data.arithmetic.seed is 'x', expected an integer (FOLDER/data/own.yaml:2)"),
    ("arithmetic:\n  seed: x\n", BASE + "data:\n  arithmetic:\n    seed: y\n",
     "data.arithmetic.seed is 'y', expected an integer (FOLDER/mine.yaml:5)"),
    ("", BASE + "arms:\n  a:\n    beta: 1\n    optimizer:\n      lr: x\n",
     "arms.a.optimizer.lr is 'x', expected a number (FOLDER/mine.yaml:7)"),
    ("", BASE + "arms:\n  a:\n", "arms.a is None, expected a mapping (FOLDER/mine.yaml:4)"),
    ("on_bad_rows: drop\n", BASE, "data.on_bad_rows is 'drop', expected one of error, skip (FOLDER/data/own.yaml:1)"),
    ("train: ???\ntest: ???\n", BASE, "a value is needed for data.train (FOLDER/data/own.yaml:1), data.test "
     "(FOLDER/data/own.yaml:2); on the command line: KEY=VALUE"),
    ("prompt: 'x\n", BASE, "FOLDER/data/own.yaml:2: invalid YAML: found unexpected end of stream"),
    ("prompt: '{question}'\nprompt: 'x'\n", BASE, "FOLDER/data/own.yaml:2: invalid YAML: found duplicate key prompt"),
    ("", BASE + "grpo: [1]\n",
     "grpo is [1], expected a section with keys of its own (FOLDER/mine.yaml:3)"),
])
def test_mistake_in_a_file_names_the_file_and_line_that_set_the_key(tmp_path: Path, data, primary, expected):
    write_configs(tmp_path, mine=primary, data__own=data)
    assert message_of("mine", [], tmp_path) == expected.replace("FOLDER", str(tmp_path))


def test_value_of_the_command_line_is_not_blamed_on_the_file_that_it_overrides(tmp_path: Path):
    write_configs(tmp_path, mine=BASE, data__own="arithmetic: {seed: 1}\n")
    assert message_of("mine", ["data.arithmetic.seed=x"], tmp_path).endswith("(command line: data.arithmetic.seed=x)")


def test_file_below_the_working_folder_is_shown_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_configs(tmp_path, mine=BASE, data__own="seeed: 1\n")
    monkeypatch.chdir(tmp_path)
    assert "(data/own.yaml:1)" in message_of("mine", [], tmp_path)


def test_unknown_config_name_lists_those_there_are_with_the_nearest(tmp_path: Path):
    write_configs(tmp_path, alpha_sweep="name: a\n", other="name: b\n")
    assert message_of("alpha_sweap", [], tmp_path) == (
        f"no config named alpha_sweap in {tmp_path}; did you mean alpha_sweep? (there are: alpha_sweep, other)"
    )


def test_config_folder_that_is_not_there_is_named(tmp_path: Path):
    assert message_of("quickstart", [], tmp_path / "none") == (
        f"no config named quickstart: {tmp_path / 'none'} is not a folder"
    )


def test_a_failed_composition_leaves_hydra_ready_for_the_next():
    message_of("quickstart", ["data=none"])
    assert compose_run("quickstart", []).name == "quickstart"
