"""What a user reads when a command's input is wrong: one ``nemo-edo: error:`` message, status 2, nothing left behind.

All commands run one after another in one process of their own (tests/helpers/commands.py): they need Megatron's
platform, which changes a process for good, and its import takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_edo.config import ArithmeticConfig, GRPOConfig, IDPOConfig, RunConfig, ScheduleConfig
from nemo_edo.configuration import compose_run, resolved_yaml
from nemo_edo.data.arithmetic_model import write_base_model

COMMANDS = Path(__file__).parents[1] / "helpers" / "commands.py"
ARCHITECTURE = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 128}
ROWS = [{"question": f"{i} + {i + 1}", "answer": f"{i} + {i + 1} = {2 * i + 1}\n#### {2 * i + 1}"} for i in range(6)]


class Inputs:
    """Writes a case's input files into a folder of its own, where its runs go as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str, rows: list) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    def problems(self, train: list = ROWS[:3], test: list = ROWS[3:]) -> list[str]:
        return [f"data.train={self.rows('train.jsonl', train)}", f"data.test={self.rows('test.jsonl', test)}"]

    def model(self, **architecture) -> Path:
        """A model folder that lacks nothing but the model's own weights."""
        folder = self.folder / "model"
        write_base_model(folder, {**ARCHITECTURE, **architecture}, ArithmeticConfig())
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
        return folder

    def with_model(self, damage: Callable[[Path], object], **architecture) -> list[str]:
        folder = self.model(**architecture)
        damage(folder)
        return self.train(f"model.path={folder}", "model.architecture=null")

    def train(self, *overrides: str) -> list[str]:
        return ["train", "name=a", f"output_dir={self.folder / 'runs'}", "sft.steps=1", *overrides]

    def run(self, **changes) -> Path:
        """The folder of a run of two arms that was killed before its first checkpoint."""
        folder = self.folder / "runs" / "a"
        arms = {"one": {"alpha": 0}, "two": {"alpha": 1}}
        cfg = replace(quickstart(), name=folder.name, output_dir=str(folder.parent), arms=arms, **changes)
        return write(folder / "config.yaml", resolved_yaml(cfg)).parent


@cache
def quickstart() -> RunConfig:
    return compose_run("quickstart", ["sft.steps=1"])


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def checkpoints(run: Path, *arms: str) -> Path:
    for arm in arms:
        (run / "checkpoints" / arm).mkdir(parents=True)
    return run


def used_name(inputs: Inputs) -> list[str]:
    inputs.run(seed=1)
    return inputs.train("~arms", "+arms={one: {alpha: 0}, two: {alpha: 1}}", "seed=2")


# name: (the command, what its message has to say; {} is the case's folder)
CASES: dict[str, tuple[Callable[[Inputs], list[str]], str]] = {
    "missing problem file": (
        lambda i: i.train(f"data.train={i.folder}/no.jsonl", f"data.test={i.folder}/no.jsonl"),
        "{}/no.jsonl: cannot be read (No such file or directory)"),
    "broken line": (
        lambda i: i.train(*i.problems(train=[ROWS[0], '{"question": '])), "{}/train.jsonl:2: is not valid JSON"),
    "missing field": (
        lambda i: i.train(*i.problems(test=[ROWS[0], {"question": "1 + 1"}])),
        '{}/test.jsonl:2: has no "answer" (its keys: question)'),
    "no answer line": (
        lambda i: i.train(*i.problems(train=[{"question": "1 + 1", "answer": "2"}, ROWS[0]])),
        '{}/train.jsonl:1: "answer" does not end in one "#### number" line'),
    "empty file": (lambda i: i.train(*i.problems(train=[])), "{}/train.jsonl: has no rows"),
    "duplicate question": (
        lambda i: i.train(*i.problems(train=[*ROWS[:3], ROWS[1]])),
        '{}/train.jsonl:4: "question" is the same as on line 2'),
    "nothing but bad rows": (
        lambda i: ["train", "--on-bad-rows=skip", *i.train(*i.problems(train=["{", "["]))[1:]],
        "{}/train.jsonl: bad rows: 2 of 2; no good row is left"),
    "train and test of one name": (
        lambda i: i.train(f"data.train={i.rows('x/p.jsonl', ROWS)}", f"data.test={i.rows('y/p.jsonl', ROWS[:3])}"),
        "data.train and data.test have files of one name, so 3 problems share an id"),
    "long prompt": (
        lambda i: i.train(*i.problems(test=[ROWS[0], {"question": " + ".join("1" * 30), "answer": "#### 30"}])),
        "{}/test.jsonl:2: the prompt has 60 tokens, more than the 32"),
    "too many built-in problems": (
        lambda i: i.train("data.arithmetic.test_problems=99999"), "data.arithmetic asks for 99999 test problems"),
    "no model folder": (
        lambda i: i.train(f"model.path={i.folder}/none", "model.architecture=null"),
        "{}/none is not a Hugging Face model folder: it has no config.json"),
    "broken config.json": (
        lambda i: i.with_model(lambda model: (model / "config.json").write_text("{")),
        "{}/model/config.json is not valid JSON"),
    "no tokenizer": (
        lambda i: i.with_model(lambda model: [file.unlink() for file in model.glob("*token*")]),
        "{}/model has no tokenizer"),
    "half a tokenizer": (
        lambda i: i.with_model(lambda model: (model / "tokenizer.json").unlink()),
        "the tokenizer of {}/model cannot be loaded"),
    "no weights": (
        lambda i: i.with_model(lambda model: (model / "model.safetensors").unlink()),
        "{}/model has no *.safetensors weights"),
    "weights cut short": (
        lambda i: i.with_model(lambda model: write(model / "model.safetensors", "version https://git-lfs.github.com")),
        "{}/model/model.safetensors cannot be read ("),
    "missing shard": (
        lambda i: i.with_model(lambda model: write(
            model / "model.safetensors.index.json", '{"weight_map": {"w": "model-2-of-2.safetensors"}}')),
        "{}/model/model-2-of-2.safetensors cannot be read (No such file or directory"),
    "unsupported architecture": (
        lambda i: i.with_model(lambda model: edit_config(model, architectures=["GPT2LMHeadModel"])),
        "{}/model/config.json: architectures ['GPT2LMHeadModel'] are not supported by Megatron-Bridge; supported are"),
    "short context": (
        lambda i: i.with_model(lambda model: None, max_position_embeddings=48),
        "model.seq_length is 64, but {}/model/config.json has max_position_embeddings 48"),
    "unknown architecture field": (
        lambda i: i.train("model.architecture.num_layer=3"), "model.architecture.num_layer is no field of "),
    "tracking setting that NeMo lacks": (
        lambda i: i.train("exp_manager.bogus=1"), "exp_manager.bogus: Key 'bogus' not in 'ExpManagerConfig'"),
    "tracking setting of a wrong type": (
        lambda i: i.train("exp_manager.create_wandb_logger=maybe"), "exp_manager.create_wandb_logger: Value 'maybe'"),
    "arm of the start's name": (
        lambda i: i.train("+arms.warmup={alpha: 0}"), "arms.warmup: warmup is what the start of all arms is called"),
    "output folder below a file": (
        lambda i: i.train(f"output_dir={write(i.folder / 'file', '')}"),
        "{}/file/a cannot be made (Not a directory); choose another output_dir=..."),
    "more processes needed": (
        lambda i: i.train("parallelism=tp2"), "1 processes cannot be split into tensor_model_parallel_size 2"),
    "name of another run": (used_name, "{}/runs/a exists already with another config: seed is 1 there and 2 here"),
    "no stored rollouts": (
        lambda i: i.train(f"train.rollouts={i.folder}/none"), "{}/none/iter_00000: has no rollouts"),
    "best by an unknown metric": (
        lambda i: i.train("evaluation.every=1", "checkpoint.best=acuracy"), "checkpoint.best is 'acuracy', expected"),
    "unknown key": (lambda i: i.train("grpo.alhpa=0"), "unknown key grpo.alhpa (command line: grpo.alhpa=0)"),
    "export of no run": (
        lambda i: ["export", str(i.folder), str(i.folder / "out")],
        "{} is not the folder of a run: it has no config.yaml"),
    "export of an unknown arm": (
        lambda i: ["export", str(i.run()), str(i.folder / "out"), "--arm=three"],
        "{}/runs/a has no arm 'three'; it has warmup, one, two"),
    "export of one of several arms": (
        lambda i: ["export", str(i.run()), str(i.folder / "out")],
        "{}/runs/a has the arms one, two: choose one with --arm"),
    "export of an unfinished arm": (
        lambda i: ["export", str(i.run()), str(i.folder / "out"), "--arm=one"],
        "{}/runs/a/checkpoints/one is missing: the run did not come to the end of arm one"),
    "export into a folder in use": (
        lambda i: ["export", str(checkpoints(i.run(), "one")), str(write(i.folder / "out/x", "").parent),
                   "--arm=one"],
        "{}/out exists already and is not an empty folder"),
    "export onto a file": (
        lambda i: ["export", str(checkpoints(i.run(), "one")), str(write(i.folder / "out", "")), "--arm=one"],
        "{}/out exists already and is not an empty folder"),
    "evaluate of no run": (
        lambda i: ["evaluate", str(i.folder)], "{} is not the folder of a run: it has no config.yaml"),
    "evaluate with foreign overrides": (
        lambda i: ["evaluate", str(i.run()), "evaluation.samples=2", "seed=3", "grpo.alpha=0"],
        "evaluate takes overrides of evaluation.* only, not seed=3, grpo.alpha=0"),
    "evaluate with a wrong value": (
        lambda i: ["evaluate", str(i.run()), "evaluation.samples=0"], "evaluation.samples is 0"),
    "evaluate of an unknown arm": (
        lambda i: ["evaluate", str(i.run()), "--arm=three"], "{}/runs/a has no arm 'three'; it has warmup, one, two"),
    "evaluate of a run whose last arm is unfinished": (
        lambda i: ["evaluate", str(checkpoints(i.run(), "warmup", "one"))],
        "{}/runs/a/checkpoints/two is missing: the run did not come to the end of arm two"),
    "report of no run": (
        lambda i: ["report", str(i.folder)], "{}: no run is in it; name folders of runs"),
}
SKIPPED, BOTH = "bad rows are skipped", "arms of both algorithms"
ALONE = "supervised training alone"
ALONES_REPORT, ALONES_EXPORT = "report of supervised training", "export of supervised training"


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Of each case: status, out, err, traceback, its folder, and what stood in that before and after."""
    root = tmp_path_factory.mktemp("commands")
    names = [*CASES, SKIPPED, BOTH, ALONE, ALONES_REPORT, ALONES_EXPORT]
    cases = {name: Inputs(root / f"case{index}") for index, name in enumerate(names)}
    for inputs in cases.values():
        inputs.folder.mkdir()
    commands = {name: build(cases[name]) for name, (build, _) in CASES.items()}
    small = ["grpo.iterations=1", "grpo.minibatch_size=8", "idpo.iterations=1", "idpo.minibatch_size=2",
             "sampling.samples_per_prompt=2", "sampling.max_new_tokens=4", "evaluation.samples=2",
             "evaluation.rollouts=1", "evaluation.bootstrap=10"]
    problems = cases[SKIPPED].problems(train=[*ROWS[:4], "{", ROWS[0]], test=[*ROWS[4:], "["])
    commands[SKIPPED] = ["train", "--on-bad-rows=skip", *cases[SKIPPED].train(*problems, "~arms", *small)[1:]]
    arms = "+arms={ed_idpo: {algorithm: idpo, alpha: 0.5}, grpo: {alpha: 0}}"
    commands[BOTH] = cases[BOTH].train(*cases[BOTH].problems(), "~arms", arms, *small)
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


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_one_message_on_stderr_with_status_2(results, name: str):
    result, told = results[name], CASES[name][1]
    assert result["traceback"] == ""
    assert (result["status"], result["out"]) == (2, "")
    assert result["err"].startswith("nemo-edo: error: ")
    assert told.format(result["folder"]) in result["err"]


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_leaves_every_folder_as_it_was(results, name: str):
    assert results[name]["after"] == results[name]["before"]


def test_skipped_rows_are_counted_told_and_the_run_goes_on(results):
    result = results[SKIPPED]
    assert (result["status"], result["traceback"]) == (0, "")
    assert "3 bad rows of the problems files were left out" in result["out"].splitlines()
    run = result["folder"] / "runs" / "a"
    assert json.loads((run / "summary.json").read_text())["skipped_rows"] == 3
    evaluation = json.loads((run / "evaluations" / "policy.json").read_text())
    assert evaluation["problems"] == ["test-1", "test-2"]


def test_a_single_step_for_each_collection_is_warned_of_once_on_stderr(results):
    """NeMo swallows Python's warnings when it is imported: this one has to come through."""
    assert results[SKIPPED]["err"].count("one optimizer step for each collection") == 1


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


def test_supervised_training_alone_is_evaluated_reported_and_exported(results):
    for name in (ALONE, ALONES_REPORT, ALONES_EXPORT):
        assert (results[name]["status"], results[name]["traceback"]) == (0, ""), name
    run = results[ALONE]["folder"] / "runs" / "a"
    assert json.loads((run / "summary.json").read_text())["arms"] == {}
    kinds = {json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"sft_step", "evaluation"}
    assert any(line.split()[:1] == ["SFT"] for line in results[ALONE]["out"].splitlines())
    assert "SFT" in (results[ALONES_REPORT]["folder"] / "report.html").read_text()
    assert (results[ALONES_EXPORT]["folder"] / "out" / "model.safetensors").is_file()


# --- labels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "label"), [
    ({"alpha": 0.0}, "GRPO"),
    ({}, "ED-GRPO α=0.001"),
    ({"alpha": 300.0, "log_ratio_floor": -0.1}, "ED-GRPO α=300, floor -0.1"),
    ({"exploration_coefficient": 0.3}, "ED-GRPO αβ=0.3"),
    ({"alpha": 0.0, "entropy_coefficient": 0.03}, "GRPO, entropy bonus 0.03"),
    ({"beta": 0.0}, "GRPO"),
    ({"alpha": 0.0, "log_ratio_floor": -0.1}, "GRPO"),
    ({"exploration_control": "noise"}, "ED-GRPO α=0.001, pure noise"),
    ({"redundancy_weighted": True, "explore_uninformative_groups": False},
     "ED-GRPO α=0.001, redundancy-weighted, without zero-advantage groups"),
    ({"schedule": ScheduleConfig(kind="cosine", steps=9)}, "ED-GRPO α=0.001, cosine schedule"),
    ({"alpha": 0.0, "exploration_control": "noise", "redundancy_weighted": True, "explore_uninformative_groups": False,
      "schedule": ScheduleConfig(kind="cosine", steps=9)}, "GRPO"),
    ({"alpha": 0.0, "covariance_control": "kl-cov"}, "GRPO, kl-cov"),
    ({"alpha": 0.0, "pass_k": 4, "novelty_strength": 0.5}, "GRPO, pass@4, novelty 0.5"),
    ({"alpha": 0.0, "dynamic_sampling": True, "importance_sampling_level": "sequence"},
     "GRPO, dynamic sampling, sequence ratios"),
])
def test_a_grpo_arms_label_says_what_it_trains_with(settings: dict, label: str):
    from nemo_edo.summary import arm_label

    assert arm_label(replace(GRPOConfig(), **settings)) == label


@pytest.mark.parametrize(("settings", "label"), [
    ({"alpha": 0.0}, "ETO"),
    ({}, "ED-iDPO α=0.001"),
    ({"exploration_coefficient": 0.3, "log_ratio_floor": -0.1}, "ED-iDPO αβ=0.3, floor -0.1"),
    ({"schedule": ScheduleConfig(kind="gradient-share")}, "ED-iDPO α=0.001, gradient-share schedule"),
    ({"alpha": 0.0, "schedule": ScheduleConfig(kind="linear", steps=9)}, "ETO"),
])
def test_an_idpo_arms_label_says_what_it_trains_with(settings: dict, label: str):
    from nemo_edo.summary import arm_label

    assert arm_label(replace(IDPOConfig(), **settings)) == label


def test_the_helper_sees_tracebacks(tmp_path: Path):
    """Otherwise the claims above could not fail."""
    assert shutil.which(sys.executable)
    code = f"""
import runpy, nemo_edo.configuration
nemo_edo.configuration.compose_job = lambda *_: 1 / 0
result = runpy.run_path({str(COMMANDS)!r})["run"](["train"])
print(result["status"], "ZeroDivisionError" in result["traceback"])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "None True\n"
