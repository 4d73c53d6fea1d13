"""What a user reads when a command's input is wrong: one ``nemo-edo: error:`` message, status 2, nothing left behind.

All commands run one after another in one separate process (tests/helpers/commands.py): they need Megatron's
platform, which changes a process for good, and its import takes seconds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from helpers.problem_files import ROWS, write_rows
from safetensors.torch import save_file

from nemo_edo.builtin_task.model import write_base_model
from nemo_edo.config import ArithmeticConfig, GRPOConfig, IDPOConfig, RunConfig, ScheduleConfig
from nemo_edo.config.arms import arm_label
from nemo_edo.config.compose import compose_run, resolved_yaml

COMMANDS = Path(__file__).parents[2] / "helpers" / "commands.py"
ARCHITECTURE = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 128}


class Inputs:
    """Writes a case's input files into its own folder, where its runs go as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def problems(self, train: list = ROWS[:3], test: list = ROWS[3:]) -> list[str]:
        return [f"data.{name}={write_rows(self.folder / f'{name}.jsonl', rows)}"
                for name, rows in (("train", train), ("test", test))]

    def train(self, *overrides: str) -> list[str]:
        return ["train",
                "replicate_baseline=false", "name=a", f"output_dir={self.folder / 'runs'}", "sft.steps=1", *overrides]

    def of_model(self, damage: Callable[[Path], object]) -> list[str]:
        """A model folder that lacks nothing but the model's own weights, until it is damaged."""
        model = self.folder / "model"
        write_base_model(model, ARCHITECTURE, ArithmeticConfig())
        save_file({"weight": torch.zeros(1)}, model / "model.safetensors")
        damage(model)
        return self.train(f"model.path={model}", "model.architecture=null")

    def of_run(self, command: str, finished: str) -> list[str]:
        """A run of two arms, killed when these arms were finished."""
        run = self.folder / "runs" / "a"
        run.mkdir(parents=True)
        for arm in finished.split():
            (run / "checkpoints" / arm).mkdir(parents=True)
        arms = {"one": {"alpha": 0}, "two": {"alpha": 1}}
        cfg = replace(quickstart(), name="a", output_dir=str(run.parent), arms=arms)
        (run / "config.yaml").write_text(resolved_yaml(cfg))
        return self.filled(command)

    def filled(self, words: str) -> list[str]:
        return words.replace("{}", str(self.folder)).split()


@cache
def quickstart() -> RunConfig:
    return compose_run("quickstart", ["replicate_baseline=false", "sft.steps=1"])


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# In all tables {} is the case's folder, and the last column what the message has to name. test_build.py has the
# problem files'.
DAMAGED_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken config.json": (
        lambda model: (model / "config.json").write_text("{"), "{}/model/config.json:1: not valid JSON"),
    "no tokenizer": (
        lambda model: [file.unlink() for file in model.glob("*token*")], "{}/model has no tokenizer"),
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(), "{}/model has neither model.safetensors nor"),
    "weights cut short": (
        lambda model: (model / "model.safetensors").write_text("version https://git-lfs.github.com"),
        "{}/model/model.safetensors cannot be read ("),
    "missing shard": (
        lambda model: ((model / "model.safetensors").unlink(),
                       (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "2.safetensors"}}')),
        "{}/model/2.safetensors cannot be read (No such file or directory"),
    "unsupported architecture": (
        lambda model: edit_config(model, architectures=["GPT2LMHeadModel"]),
        "{}/model/config.json: architectures ['GPT2LMHeadModel'] are not supported by Megatron-Bridge"),
    "short context": (
        lambda model: edit_config(model, max_position_embeddings=48),
        "model.seq_length is 64, but {}/model/config.json has max_position_embeddings 48"),
}
TRAIN = {
    "no model folder": (
        "model.path={}/none model.architecture=null", "{}/none is not a Hugging Face model folder"),
    "tracking setting that NeMo lacks": ("exp_manager.bogus=1", "exp_manager.bogus: "),
    "tracking setting of another type": (
        "exp_manager.create_tensorboard_logger=maybe", "exp_manager.create_tensorboard_logger: "),
    "arm of the start's name": ("+arms.warmup={alpha:0}", "arms.warmup: warmup is the name of the start of all arms"),
    "output folder below a file": (
        "output_dir={}/train.jsonl", "{}/train.jsonl/a cannot be made in {}/train.jsonl (Not a directory)"),
    "more processes needed": (
        "parallelism=tp2", "tensor_model_parallel_size 2 needs a multiple of 2 processes, got 1"),
    "no stored rollouts": ("train.rollouts={}/none", "{}/none/iter_00000: has no rollouts"),
    "best by an unknown metric": ("evaluation.every=1 checkpoint.best=acuracy", "checkpoint.best is 'acuracy'"),
    "stop by an unknown metric": ("evaluation.every=1 early_stop.metric=pass@99", "early_stop.metric is 'pass@99'"),
    "stop without evaluations": ("early_stop.metric=accuracy", "set evaluation.every"),
    "stop in no direction": ("early_stop.mode=up", "early_stop.mode is 'up'"),
    "output in the kernel's files": (
        "output_dir=/proc/x", "/proc/x/a cannot be made in /proc (its file system takes no files); choose another"),
}
# The second column has the arms that are finished.
OF_A_RUN = {
    "name of another run": (
        "train name=a output_dir={}/runs sft.steps=1 replicate_baseline=false ~arms "
        "+arms={one:{alpha:0},two:{alpha:1}} seed=2", "",
        "{}/runs/a exists already with another config: seed is 42 there and 2 here"),
    "export of an unknown arm": (
        "export {}/runs/a {}/out --arm=three", "", "{}/runs/a has no arm 'three'; it has warmup, one, two"),
    "export of one of several arms": (
        "export {}/runs/a {}/out", "", "{}/runs/a has the arms one, two: choose one with --arm"),
    "export of an unfinished arm": (
        "export {}/runs/a {}/out --arm=one", "", "{}/runs/a/checkpoints/one is missing"),
    "export into a folder in use": (
        "export {}/runs/a {}/runs --arm=one", "one", "{}/runs exists already and is not an empty folder"),
    "collect of an unknown arm": (
        "collect output_dir={}/new --arm=grp", "", "the config has no arm 'grp'; did you mean grpo? (there are: "),
    "evaluate of no run": ("evaluate {}/runs", "", "{}/runs is not the folder of a run"),
    "evaluate with foreign overrides": (
        "evaluate {}/runs/a evaluation.samples=2 seed=3 grpo.alpha=0", "",
        "evaluate takes overrides of evaluation.* only, not seed=3, grpo.alpha=0"),
    "evaluate of a run whose last arm is unfinished": (
        "evaluate {}/runs/a", "warmup one", "{}/runs/a/checkpoints/two is missing"),
    "report of no run": ("report {}/runs/a/checkpoints", "one", "{}/runs/a/checkpoints: no run is in it"),
}
TOLD = {name: row[-1] for table in (DAMAGED_MODELS, TRAIN, OF_A_RUN) for name, row in table.items()}
SKIPPED, BOTH = "bad rows are skipped", "arms of both algorithms"
ALONE = "supervised training alone"
ALONES_REPORT, ALONES_EXPORT = "report of supervised training", "export of supervised training"


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Of each case: status, out, err, traceback, its folder, and what was in that before and after."""
    root = tmp_path_factory.mktemp("commands")
    names = [*TOLD, SKIPPED, BOTH, ALONE, ALONES_REPORT, ALONES_EXPORT]
    cases = {name: Inputs(root / f"case{index}") for index, name in enumerate(names)}
    commands = {name: cases[name].of_model(damage) for name, (damage, _) in DAMAGED_MODELS.items()}
    commands |= {name: cases[name].of_run(command, finished) for name, (command, finished, _) in OF_A_RUN.items()}
    for name, (overrides, _) in TRAIN.items():
        commands[name] = cases[name].train(*cases[name].problems(), *cases[name].filled(overrides))
    small = ["grpo.iterations=1", "grpo.minibatch_size=8", "idpo.iterations=1", "idpo.minibatch_size=2",
             "sampling.samples_per_prompt=2", "sampling.max_new_tokens=4", "evaluation.samples=2",
             "evaluation.rollouts=1", "evaluation.bootstrap=10"]
    problems = cases[SKIPPED].problems(train=[*ROWS[:4], "{", ROWS[0]], test=[*ROWS[4:], "[", ROWS[1]])
    allowed = ["~arms", "data.allow_overlap=true", *small]
    commands[SKIPPED] = ["train", "--on-bad-rows=skip", *cases[SKIPPED].train(*problems, *allowed)[1:]]
    arms = "+arms={ed_idpo: {algorithm: idpo, alpha: 0.5}, grpo: {alpha: 0}}"
    commands[BOTH] = cases[BOTH].train(*cases[BOTH].problems(), "~arms", arms, *small, "model.seq_length=null")
    commands[ALONE] = cases[ALONE].train(*cases[ALONE].problems(), "~arms", "algorithm=sft", *small)
    alone = str(cases[ALONE].folder / "runs" / "a")
    commands[ALONES_REPORT] = ["report", alone, "-o", str(cases[ALONES_REPORT].folder / "report.html")]
    commands[ALONES_EXPORT] = ["export", alone, str(cases[ALONES_EXPORT].folder / "out")]
    before = {name: listing(inputs.folder) for name, inputs in cases.items()}
    (root / "in.json").write_text(json.dumps(commands))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(COMMANDS), str(root / "in.json"), str(root / "out.json")],
                          env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((root / "out.json").read_text())
    return {name: {**results[name], "folder": inputs.folder, "before": before[name], "after": listing(inputs.folder)}
            for name, inputs in cases.items()}


@pytest.mark.parametrize("name", TOLD)
def test_wrong_input_is_one_message_on_stderr_with_status_2_and_leaves_every_folder_as_it_was(results, name: str):
    result = results[name]
    assert result["traceback"] == ""
    assert (result["status"], result["out"]) == (2, "")
    assert result["err"].startswith("nemo-edo: error: ")
    assert TOLD[name].replace("{}", str(result["folder"])) in result["err"]
    assert result["after"] == result["before"]


def test_skipped_rows_and_overlap_are_counted_the_run_continues_and_its_warnings_reach_stderr_once(results):
    result = results[SKIPPED]
    assert (result["status"], result["traceback"]) == (0, "")
    assert "3 bad rows of the problems files were left out" in result["out"].splitlines()
    assert "1 of the 3 test problems are train problems, too (data.allow_overlap)" in result["out"].splitlines()
    run = result["folder"] / "runs" / "a"
    assert json.loads((run / "summary.json").read_text())["skipped_rows"] == 3
    evaluation = json.loads((run / "evaluations" / "policy.json").read_text())
    assert evaluation["problems"] == ["test-1", "test-2", "test-4"]
    # NeMo swallows Python's warnings when it is imported: this one has to come through.
    assert result["err"].count("one optimizer step for each collection") == 1


def test_a_run_trains_and_compares_arms_of_both_algorithms(results):
    result = results[BOTH]
    assert (result["status"], result["traceback"]) == (0, "")
    run = result["folder"] / "runs" / "a"
    summary = json.loads((run / "summary.json").read_text())
    told = {name: [arm[key] for key in ("algorithm", "label", "beta", "entropy_coefficient")]
            for name, arm in summary["arms"].items()}
    assert told == {"ed_idpo": ["idpo", "ED-iDPO α=0.5", 0.1, 0.0], "grpo": ["grpo", "GRPO", 0.001, 0.0]}
    assert summary["baseline"] == "grpo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {arm: [line for line in lines if (line["kind"], line["arm"]) == ("train_step", arm)] for arm in told}
    assert [line["exploration_weight"] for line in steps["ed_idpo"]] == [0.05] * 2  # three prompts by two
    assert [line["exploration_weight"] for line in steps["grpo"]] == [0.0]
    collections = {line["arm"]: line for line in lines if line["kind"] == "collection"}
    assert collections["ed_idpo"]["prompts_without_pairs"] == 3  # a policy that knows nothing: it explores all the same
    assert {"preference_loss", "reward_margin"} < steps["ed_idpo"][0].keys()
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["model"]["seq_length"] == 13


def test_supervised_training_alone_is_evaluated_reported_and_exported(results):
    for name in (ALONE, ALONES_REPORT, ALONES_EXPORT):
        assert (results[name]["status"], results[name]["traceback"]) == (0, ""), name
    run = results[ALONE]["folder"] / "runs" / "a"
    assert json.loads((run / "summary.json").read_text())["arms"] == {}
    kinds = {json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"sft_step", "evaluation", "phases"}
    assert any(line.split()[:1] == ["SFT"] for line in results[ALONE]["out"].splitlines())
    assert "SFT" in (results[ALONES_REPORT]["folder"] / "report.html").read_text()
    assert (results[ALONES_EXPORT]["folder"] / "out" / "model.safetensors").is_file()


# --- labels -------------------------------------------------------------------------------------------------------


COSINE = ScheduleConfig(kind="cosine", steps=9)
RESTRICTED = {"redundancy_weighted": True, "explore_uninformative_groups": False}


@pytest.mark.parametrize(("config", "label"), [
    (GRPOConfig(alpha=0.0), "GRPO"),
    (GRPOConfig(alpha=300.0, log_ratio_floor=-0.1), "ED-GRPO α=300, floor -0.1"),
    (GRPOConfig(alpha=0.0, entropy_coefficient=0.03), "GRPO, entropy bonus 0.03"),
    (GRPOConfig(beta=0.0), "GRPO"),
    (GRPOConfig(exploration_control="noise"), "ED-GRPO α=0.001, pure noise"),
    (GRPOConfig(schedule=COSINE, **RESTRICTED),
     "ED-GRPO α=0.001, cosine schedule, redundancy-weighted, without zero-advantage groups"),
    (GRPOConfig(alpha=0.0, log_ratio_floor=-0.1, exploration_control="noise", schedule=COSINE, **RESTRICTED), "GRPO"),
    (GRPOConfig(exploration_samples="previous"), "ED-GRPO α=0.001, on samples of the previous policy"),
    (GRPOConfig(alpha=0.0, exploration_samples="reference"), "GRPO"),
    (GRPOConfig(alpha=0.0, covariance_control="kl-cov"), "GRPO, kl-cov"),
    (GRPOConfig(alpha=0.0, pass_k=4, novelty_strength=0.5), "GRPO, pass@4, novelty 0.5"),
    (GRPOConfig(alpha=0.0, dynamic_sampling=True, importance_sampling_level="sequence"),
     "GRPO, dynamic sampling, sequence ratios"),
    (IDPOConfig(alpha=0.0), "ETO"),
    (IDPOConfig(exploration_coefficient=0.3, log_ratio_floor=-0.1), "ED-iDPO αβ=0.3, floor -0.1"),
    (IDPOConfig(schedule=COSINE), "ED-iDPO α=0.001, cosine schedule"),
])
def test_an_arms_label_says_what_it_trains_with(config, label: str):
    assert arm_label(config) == label
