"""The whole job, for real and tiny: trained twice, evaluated and exported."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers.problem_files import write_sums

from nemo_edo.config.compose import compose_run

SFT_STEPS, ITERATIONS, STEPS_PER_ITERATION, SAMPLES, MAX_NEW_TOKENS = 80, 2, 3, 6, 10
SETTINGS = [
    f"sft.steps={SFT_STEPS}", "sft.batch_size=16", "sft.micro_batch_size=8", "sft.optimizer.lr=4e-3",
    # Adam divides by the gradient's size: a large epsilon keeps rounding from growing over the steps.
    "sft.optimizer.adam_eps=1e-3", "grpo.optimizer.adam_eps=1e-3",
    f"sampling.samples_per_prompt={SAMPLES}", f"sampling.max_new_tokens={MAX_NEW_TOKENS}",
    f"grpo.iterations={ITERATIONS}", "grpo.minibatch_size=16", "grpo.micro_batch_size=8", "grpo.optimizer.lr=2e-4",
    "evaluation.samples=4", "evaluation.rollouts=2", "evaluation.every=1", "evaluation.bootstrap=50",
    "grpo.beta=0.001", "grpo.problems_per_iteration=null", "sft.optimizer.warmup_steps=0",
    "grpo.optimizer.warmup_steps=0", "~arms", "replicate_baseline=false",
]
EXPLORING_ARM = "edo: {alpha: 300, log_ratio_floor: -0.1}"
ARMS = ("grpo", "edo")
TRAINED = (*ARMS, "replicate")


@dataclass(frozen=True)
class Finished:
    """A run as it was when its training ended; later commands change the folder."""

    folder: Path
    lines: list[dict]
    evaluations: dict[str, dict]
    output: str

    @classmethod
    def of(cls, folder: Path, output: str) -> Finished:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        evaluations = {path.stem: json.loads(path.read_text()) for path in (folder / "evaluations").glob("*.json")}
        return cls(folder, lines, evaluations, output)

    def of_kind(self, kind: str, arm: str) -> list[dict]:
        return [line for line in self.lines if (line["kind"], line["arm"]) == (kind, arm)]

    def rollouts(self, arm: str, iteration: int) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "rollouts" / arm / f"iter_{iteration:05d}" / "rank_0_of_1.parquet")


def record_models(out: str) -> None:
    """In a run's process: ``out`` will have a line for each model: how many earlier ones are alive as it is built."""
    from nemo_edo.worker.worker import Worker

    models: list[weakref.ref] = []
    drop, build = Worker.drop, Worker.build

    def dropped(worker):
        drop(worker)
        with Path(out).open("a") as file:
            file.write(f"{sum(model() is not None for model in models)}\n")

    def built(worker, *args):
        place = build(worker, *args)
        chunk = worker.model.built.chunks[0]
        models.extend(map(weakref.ref, (worker.model, chunk, next(chunk.parameters()))))  # an optimizer has the last
        return place

    Worker.drop, Worker.build = dropped, built


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    """Some solutions of the warm-up are wrong, so that about half is answered rightly."""
    output = tmp_path_factory.mktemp("runs")
    problems = write_sums(tmp_path_factory.mktemp("problems"), lambda a, b: (4 * (a - 1) + b - 1) % 6 == 1)
    return ["train", "--config-name=quickstart", "name=tiny", f"output_dir={output}", *SETTINGS,
            f"+arms={{grpo: {{alpha: 0}}, {EXPLORING_ARM}}}", "replicate_baseline=true", *problems]


@pytest.fixture(scope="module")
def runs(arguments, nemo_edo) -> tuple[Finished, Finished]:
    """The job run twice by the same command."""
    composed = compose_run("quickstart", arguments[2:])
    folder = Path(composed.output_dir) / composed.name
    recorded = [("tests.e2e.test_train:record_models", str(folder.with_name("alive")))]
    first, second = nemo_edo.succeed(*arguments, before=recorded), nemo_edo.succeed(*arguments)
    return Finished.of(folder.with_name("tiny.1"), first), Finished.of(folder, second)


@pytest.fixture(scope="module")
def first(runs) -> Finished:
    return runs[0]


def test_the_run_folder_has_all_files_and_its_config_yaml_composes_to_the_runs_config(arguments, first: Finished):
    expected = {"config.yaml", "metrics.jsonl", "summary.json", "samples.json", "base/config.json",
                "base/model.safetensors", "base/tokenizer.json", "report.html"}
    expected |= {f"evaluations/{arm}.json" for arm in ("warmup", *ARMS)}
    expected |= {f"checkpoints/{arm}/metadata.json" for arm in ("warmup", *ARMS)}
    expected |= {f"rollouts/{arm}/iter_{t:05d}/rank_0_of_1.parquet" for arm in ARMS for t in range(ITERATIONS)}
    found = {str(path.relative_to(first.folder)) for path in first.folder.rglob("*")}
    assert expected - found == set()
    assert not [path for path in found if path.endswith((".part", ".tmp"))]
    assert compose_run("config", [], first.folder) == compose_run("quickstart", arguments[2:])


def test_metrics_have_a_line_for_each_step_collection_and_evaluation(first: Finished):
    counts = {arm: [len(first.of_kind(kind, arm)) for kind in ("sft_step", "collection", "train_step", "evaluation")]
              for arm in ("warmup", *TRAINED)}
    trained = [0, ITERATIONS, ITERATIONS * STEPS_PER_ITERATION, ITERATIONS + 1]
    assert counts == {"warmup": [SFT_STEPS, 0, 0, 1], **dict.fromkeys(TRAINED, trained)}
    steps = first.of_kind("train_step", "grpo")
    assert [line["step"] for line in steps] == list(range(ITERATIONS * STEPS_PER_ITERATION))
    assert {line["skipped_steps"] for line in steps} == {0} and "guard" not in {line["kind"] for line in first.lines}


def test_the_first_step_of_each_iteration_is_on_policy_up_to_rounding_and_later_ones_are_not(first: Finished):
    """pi_old is the engine's, whose rounding is not the trainer's (exactly 0 with the trainer's: unit/models)."""
    for arm in ARMS:
        assert max(line["sampler_gap"] for line in first.of_kind("collection", arm)) < 1e-5
        for line in first.of_kind("train_step", arm):
            if line["step"] % STEPS_PER_ITERATION == 0:
                assert max(abs(line["exploration"]), abs(line["log_ratio"])) < 1e-6 and line["clip_fraction"] == 0.0
            else:
                assert abs(line["exploration"]) > 1e-6


def test_the_warm_up_learns_and_arms_start_from_its_policy_and_then_part(first: Finished):
    losses = [line["loss"] for line in first.of_kind("sft_step", "warmup")]
    assert losses[-1] < losses[0] / 5
    pd.testing.assert_frame_equal(*(first.rollouts(arm, 0) for arm in ARMS))
    assert not first.rollouts(ARMS[0], 1).equals(first.rollouts(ARMS[1], 1))
    [warmup] = first.of_kind("evaluation", "warmup")
    for arm in TRAINED:
        start = first.of_kind("evaluation", arm)[0]
        assert (start["iteration"], start["final"]) == (0, False)
        for name in ("greedy_accuracy", "entropy"):
            assert start["metrics"][name] == warmup["metrics"][name]
        kls = [line["kl"] for line in first.of_kind("collection", arm)]  # to the warm-up
        assert kls[0] == pytest.approx(0.0, abs=1e-9) and kls[1] > 1e-4


def test_the_replicate_is_the_baseline_with_other_samples_of_the_same_problems(first: Finished):
    ours, theirs = (first.rollouts(arm, 0) for arm in ("replicate", "grpo"))
    assert ours["prompt_ids"].map(tuple).tolist() == theirs["prompt_ids"].map(tuple).tolist()
    assert not set(ours["seed"]) & set(theirs["seed"])


def test_no_arms_model_is_alive_when_the_next_is_built_so_that_many_arms_need_the_memory_of_one(first: Finished):
    assert first.folder.with_name("alive").read_text().split() == ["0"] * (1 + len(TRAINED))


def test_the_same_command_gives_the_same_metrics_rollouts_and_evaluations_and_keeps_the_earlier_run(runs):
    first, second = runs
    without_time = [[{k: v for k, v in line.items() if k != "time"} for line in one.lines] for one in runs]
    assert without_time[0] == without_time[1]
    for arm in TRAINED:
        for iteration in range(ITERATIONS):
            pd.testing.assert_frame_equal(first.rollouts(arm, iteration), second.rollouts(arm, iteration))
    assert first.evaluations == second.evaluations
    assert f"the earlier run of this config is kept as {first.folder}" in second.output.splitlines()
    assert (first.folder / "config.yaml").read_text() == (second.folder / "config.yaml").read_text()


def test_evaluate_reproduces_the_runs_evaluations_exactly(runs, nemo_edo):
    second = runs[1]
    nemo_edo.succeed("evaluate", str(second.folder))
    again = Finished.of(second.folder, "")
    assert again.evaluations == second.evaluations
    added = again.lines[len(second.lines):]
    final = [line for line in second.lines if line["kind"] == "evaluation" and line["final"]]
    assert [(line["arm"], line["iteration"], line["metrics"]) for line in added] == [
        (line["arm"], line["iteration"], line["metrics"]) for line in final]


@torch.inference_mode()
def test_transformers_computes_the_rollouts_logprobs_from_the_exported_warm_up(runs, nemo_edo, tmp_path):
    from transformers import AutoModelForCausalLM

    first, second = runs
    nemo_edo.succeed("export", str(second.folder), str(tmp_path / "warmup"), "--arm=warmup")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warmup").eval()
    for row in first.rollouts("grpo", 0).itertuples():
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logprobs = model(ids).logits[0, :-1].float().log_softmax(dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)
        stored = torch.tensor(row.response_logprobs)
        torch.testing.assert_close(logprobs[len(row.prompt_ids) - 1 :], stored, rtol=0, atol=1e-4)
