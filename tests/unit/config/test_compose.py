"""Composition: Hydra's syntax works, values are typed, and each mistake is one line that says what and where."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_edo.config import GRPOConfig, IDPOConfig, RunConfig
from nemo_edo.config.compose import ConfigError, arm_configs, compose_run, resolved_yaml
from nemo_edo.config.run import arm_seed


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


def test_a_custom_folder_and_the_shipped_one_take_groups_of_each_other_and_no_file_there_is_hidden(tmp_path: Path):
    folder = write_configs(tmp_path, mine="defaults: [{model: tiny_llama}, {data: own}, _self_]\n"
                                          "sampling: {max_new_tokens: 8}\nname: mine\n",
                           data__own="prompt: '<{question}>'\n",
                           cluster__site="defaults: [slurm, _self_]\naccount: me\n")
    cfg = compose_run("mine", [], folder)
    assert (cfg.model.architecture["model_type"], cfg.data.prompt) == ("llama", "<{question}>")
    cluster = compose_run("quickstart", ["cluster=site"], folder).cluster
    assert (cluster.account, cluster.kind) == ("me", "slurm")
    assert "no config named quickstrat" in message_of("quickstrat", [], folder)
    write_configs(tmp_path, cluster__slurm="account: me\n")
    assert f"{folder}/cluster/slurm.yaml: quickstart is shipped" in message_of("quickstart", ["cluster=site"], folder)


def test_resolved_yaml_holds_every_setting_and_composes_to_the_same_run(tmp_path: Path):
    given = ["grpo.beta=0.9", "threads=2", "data.prompt='{question}\n\tA: '"]
    cfg = compose_run("quickstart", [*given, "++grpo.beta=${grpo.clip_low}"])  # the last wins
    write_configs(tmp_path, config=resolved_yaml(cfg))
    assert compose_run("config", [], tmp_path) == cfg
    written = OmegaConf.create(resolved_yaml(cfg))
    assert set(written) == set(RunConfig.__dataclass_fields__)
    assert written.grpo.beta == written.grpo.clip_low == 0.2


def test_without_arms_the_policy_has_the_section_of_the_runs_algorithm():
    cfg = compose_run("quickstart", ["~arms", "algorithm=idpo", "idpo.beta=0.3"])
    assert arm_configs(cfg) == {"policy": cfg.idpo, "replicate": cfg.idpo}
    assert (cfg.idpo.beta, cfg.idpo.exploration_weight) == (0.3, pytest.approx(3e-4))


def test_the_replicate_has_the_settings_of_the_first_plain_arm_and_a_seed_of_its_own():
    cfg = compose_run("quickstart", ["arms=[entropy_bonus,grpo,noise]"])
    arms = arm_configs(cfg)
    assert list(arms) == ["entropy_bonus", "grpo", "noise", "replicate"] and arms["replicate"] == arms["grpo"]
    assert [arm_seed(cfg.seed, name) == cfg.seed for name in arms] == [True, True, True, False]
    exploring = arm_configs(compose_run("quickstart", ["arms=[noise,entropy_bonus]"]))
    assert exploring["replicate"] == exploring["noise"]
    said = message_of("quickstart", ["+arms.replicate.alpha=0"])
    assert said.startswith("arms.replicate (") and "replicate_baseline adds: leave it out" in said


def test_arms_by_name_join_those_that_a_config_spells_out_and_may_be_changed_in_the_same_command(tmp_path: Path):
    folder = write_configs(tmp_path, mine="defaults: [{model: tiny_llama}, _self_]\nsampling: {max_new_tokens: 8}\n"
                                          "arms: {own: {alpha: 3}}\n")
    assert list(compose_run("mine", ["arms=[grpo,noise]"], folder).arms) == ["own", "grpo", "noise"]
    assert list(compose_run("quickstart", ["+arms=[noise]"]).arms) == ["noise"]
    arms = compose_run("quickstart", ["arms.noise.alpha=7", "arms=[grpo,noise]", "~arms.grpo"]).arms
    assert [arm["alpha"] for arm in arms.values()] == [7]
    assert compose_run("idpo_quickstart", ["arms=[ed_idpo,ed_grpo]"]).arms == {
        "ed_idpo": {}, "ed_grpo": {"algorithm": "grpo"}}  # the run's own algorithm is not repeated


def test_arms_start_from_the_section_of_their_algorithm_or_the_runs_and_differ_in_their_own_keys_only():
    overrides = ["algorithm=idpo", "idpo.beta=0.3", "grpo.beta=0.7", "~arms", "replicate_baseline=false",
                 "+arms={eto: {alpha: 0}, all: {}, dapo: {algorithm: grpo, clip_high: 0.28, optimizer: {lr: 0.5}}}"]
    cfg = compose_run("quickstart", overrides)
    arms = arm_configs(cfg)
    assert {name: type(arm) for name, arm in arms.items()} == {"eto": IDPOConfig, "all": IDPOConfig, "dapo": GRPOConfig}
    assert (arms["all"], arms["eto"]) == (cfg.idpo, replace(cfg.idpo, alpha=0))
    assert arms["dapo"] == replace(cfg.grpo, clip_high=0.28, optimizer=replace(cfg.grpo.optimizer, lr=0.5))
    assert (cfg.idpo.beta, cfg.grpo.beta) == (0.3, 0.7) and cfg.grpo.optimizer.lr != 0.5


FP8 = ["precision=fp8", "precision.fp8_param_gather=true", "parallelism.use_distributed_optimizer=true"]
NOT_REACHED = ["precision.fp8_recipe=mxfp8", "parallelism.overlap_grad_reduce=true"]


@pytest.mark.parametrize(("overrides", "told"), [
    (["~arms", "++arms.idpo={algorithm: grpo, beta: -1}"], "arms.idpo.beta is -1.0, expected a number of at least 0"),
    (["~arms", "++arms.new={algorithm: idpo, beta: -1}"], "arms.new.beta is -1.0, expected a number above 0"),
    (["grpo.schedule.kind=gradient-share", "~arms", "+arms={a: {}, b: {alpha: 0}}"], "arms.b.schedule.kind"),
    (["grpo.alpha=0.5", "+arms.new.exploration_coefficient=0.1"],
     "arms.new.alpha is 0.5, expected null with an exploration_coefficient"),
    (["grpo.novelty_strength=0.5", "arms={}", "data.train=a.jsonl", "data.test=b.jsonl"],
     "grpo.solution_paths is 'arithmetic', expected ngrams"),
    (["data.source=a:b", "data.test=x.jsonl"], "data.test is 'x.jsonl', expected null with data.source"),
    ([*FP8, "lora.rank=8"], "lora.rank is 8, expected 0 with precision.fp8_param_gather"),
    ([*FP8, *NOT_REACHED, "parallelism.overlap_param_gather=true"],
     "parallelism.overlap_param_gather is True, expected false with precision.fp8_param_gather"),
])
def test_settings_that_do_not_fit_each_other_are_told_with_their_key_and_those_of_an_arm_with_its_own(overrides, told):
    assert message_of("quickstart", overrides).startswith(told)


@pytest.mark.parametrize(("line", "told"), [
    ("grpo.alhpa=0.01", ["unknown key grpo.alhpa", "did you mean grpo.alpha?"]),
    ("arms.ed_grpo.optimizer.rl=1", ["unknown key", "did you mean arms.ed_grpo.optimizer.lr?"]),
    ("arms.ed_gpro.alpha=0.1", ["did you mean ed_grpo?", "+arms.ed_gpro.alpha=0.1 adds one"]),
    ("iterations=0", ["did you mean grpo.iterations, idpo.iterations or arms.NAME.iterations (of one arm)?"]),
    ("grpo.optimizer.lr=1e999", ["grpo.optimizer.lr is inf, expected a finite number"]),
    ("grpo.iterations=2.5", ["grpo.iterations is 2.5, expected an integer"]),
    ("grpo=3", ["grpo is 3, expected a section"]), ("grpo=[1]", ["command line: grpo=[1]"]),
    ("evaluation.temperature=1", ["evaluation.temperature is 1, expected a list, each a number"]),
    ("evaluation.temperature={a: 1}", ["evaluation.temperature is {'a': 1}, expected a list"]),
    ("cluster.options=[1]", ["cluster.options is [1], expected a mapping"]),
    ("allow_changed=[[a]]", ["allow_changed is [['a']], expected plain values in the list"]),
    ("grpo.beta=${nope}", ["grpo.beta: Interpolation key 'nope' not found"]),
    (r"data.prompt='{question} \${x}'", ['data.prompt has the text "${", expected "$ {"']),
    (r"data.prompt='{question} ${\frac{1}{2}}'", ["begins an interpolation", 'write "$ {"']),
    ("grpo.beta=???", ["a value is needed for grpo.beta", "KEY=VALUE"]),
    ("algorithm=ppo", ["algorithm is 'ppo', expected one of none, sft, grpo, idpo"]),
    ("idpo.micro_batch_tokens=100", ["idpo.micro_batch_tokens is 100", "2 * model.seq_length = 128"]),
    ("data.source=my_data", ["data.source is 'my_data', expected null or an import path"]),
    ("data.source_args.size=3", ["expected none without data.source"]),
    ("seed=1,2", ["[a,b]", "-m"]),
    ("hydra.run.dir=x", ["names no setting"]),
    ("arms=[grpo,nois]", ["no config nois in group arm; did you mean noise?"]),
    ("output_dir='/tmp/größe", ["output_dir='/tmp/größe", "KEY=VALUE"]),
    ("+arm=grpo", ["arms are chosen by arms=NAME"]),
    ("+data=gsm8k", ["the config chooses data already; data=gsm8k replaces it"]),
])
def test_mistake_on_the_command_line_is_one_line_with_key_place_and_remedy(line: str, told: list[str]):
    message = message_of("quickstart", [line])
    assert all(part in message for part in [*told, f"command line: {line}"])


BASE = "defaults: [{model: tiny_llama}, {data: own}, _self_]\nsampling: {max_new_tokens: 8}\n"


@pytest.mark.parametrize(("data", "more", "key", "place"), [
    ("prompt: '{question}'\n\narithmetic:\n  max_operandd: 3\n", "", "data.arithmetic.max_operandd", "data/own.yaml:4"),
    ("arithmetic:\n  seed: x\n", "data:\n  arithmetic:\n    seed: y\n", "data.arithmetic.seed is 'y'", "mine.yaml:5"),
    ("", "arms:\n  a:\n    beta: 1\n    optimizer:\n      lr: x\n", "arms.a.optimizer.lr is 'x'", "mine.yaml:7"),
    ("train: ???\ntest: ???\n", "", "data.train", "data/own.yaml:1"),
    ("prompt: 'x\n", "", "invalid YAML", "data/own.yaml:2"),
    ("prompt: '{question}'\nprompt: 'x'\n", "", "duplicate key prompt", "data/own.yaml:2"),
])
def test_mistake_in_a_file_names_the_key_with_the_file_and_line_that_set_it(tmp_path: Path, data, more, key, place):
    write_configs(tmp_path, mine=BASE + more, data__own=data)
    message = message_of("mine", [], tmp_path)
    assert key in message and f"{tmp_path}/{place}" in message


@pytest.mark.parametrize("name", ["größe", "a,b", "lr (high)", "alpha=0,seed=1", "it's", "[x]", "x\\"])
def test_a_folder_of_configs_may_have_any_name(tmp_path: Path, name: str):
    write_configs(tmp_path / name, mine="defaults: [quickstart, {override cluster: site}, _self_]\n",
                  cluster__site="defaults: [slurm, _self_]\naccount: me\n")
    assert compose_run("mine", [], tmp_path / name).cluster.account == "me"
    assert compose_run("quickstart", ["cluster=site"], tmp_path / name).cluster.account == "me"


def test_a_text_of_a_file_is_what_is_written_there_not_a_number_to_base_60(tmp_path: Path):
    site = "defaults: [slurm, _self_]\ntime_limit: 24:00:00\naccount: 010\noptions: {begin: 16:00, mem: 0}\n"
    write_configs(tmp_path, cluster__site=site + "environment: {CUDA_MODULES: 1.10, DEBUG: on}\n")
    given = ["cluster=site", "+cluster.environment.TRACE=true", "cluster.environment.A=010"]
    cluster = compose_run("quickstart", given, tmp_path).cluster
    assert (cluster.time_limit, cluster.account, cluster.options) == ("24:00:00", "010", {"begin": "16:00", "mem": 0})
    written = {"CUDA_MODULES": "1.10", "DEBUG": "on", "TRACE": "true", "A": "010"}
    assert cluster.environment == {**compose_run("quickstart", ["cluster=slurm"]).cluster.environment, **written}
    assert compose_run("grpo_32k", ["model.path=x", "data.train=x", "data.test=x"]).cluster.time_limit == "24:00:00"


def test_unknown_config_name_is_told_with_the_nearest_and_a_missing_folder_is_named(tmp_path: Path):
    write_configs(tmp_path, alpha_sweep="name: a\n", other="name: b\n")
    message = message_of("alpha_sweap", [], tmp_path)
    assert all(part in message for part in (str(tmp_path), "did you mean alpha_sweep?", "alpha_sweep, other"))
    assert f"{tmp_path / 'none'} is not a folder" in message_of("quickstart", [], tmp_path / "none")


@pytest.mark.parametrize("text", ["1e-3", "true", r"/a b/größe\\", "{question} it's", "a=b", r"\[\d+\]", "sort(a)"])
def test_a_text_setting_takes_any_value_as_it_is_and_a_path_s_tilde_is_the_home(monkeypatch, text):
    monkeypatch.setenv("HOME", "/home/me")
    assert compose_run("quickstart", [f"data.system_prompt={text}"]).data.system_prompt == text
    assert compose_run("quickstart", ["output_dir=~/it's"]).output_dir == "/home/me/it's"


MODEL = ["model.path=DIR", "data.test=FILE"]


@pytest.mark.parametrize("benchmark", ["gsm8k", "aime24", "s1k"])
def test_a_model_is_evaluated_on_any_benchmarks_test_file_alone(benchmark: str):
    cfg = compose_run("evaluate", [*MODEL, f"data={benchmark}"])
    assert (cfg.algorithm, cfg.sft.steps, arm_configs(cfg)) == ("none", 0, {})
    assert (cfg.data.test, cfg.data.train, cfg.data.is_built_in) == ("FILE", None, False)
    assert cfg.rewards.judge.url is None  # not needed where the judge is not asked


@pytest.mark.parametrize(("overrides", "message"), [
    ([*MODEL, "sft.steps=3"], "sft.steps is 3, expected 0 with algorithm none"),
    ([*MODEL, "+arms.a.alpha=1"], r"arms is \['a'\], expected none with algorithm none"),
    ([*MODEL, "algorithm=grpo"], "data.train is None, expected a file with data.test"),
    ([*MODEL, "generation=vllm", "generation.placement=shared"], "generation.placement is 'shared', expected apart"),
    ([*MODEL, "evaluation.temperature=[1.0,0]"], r"temperature is \[1.0, 0.0\], expected different numbers"),
    ([*MODEL, "evaluation.tuning_problems=8"], "evaluation.tuning_problems is 8, expected 0 with a single"),
])
def test_what_does_not_fit_a_run_that_trains_nothing_is_an_error(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        compose_run("evaluate", overrides)
