"""A run that is killed and gone on with ends with the numbers of one that was not, wherever it is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch

HELPER = Path(__file__).parents[1] / "helpers" / "killed_runs.py"
ARMS = ("grpo", "idpo")
RANDOM_KILLS = 5
WHOLE_QUICKSTART = "NEMO_EDO_KILL_QUICKSTART"
"""The environment variable that asks for the test of runs of the quickstart's size, which takes half an hour."""
pytestmark = pytest.mark.timeout(1800)
SETTINGS = [
    "sft.steps=24", "sft.batch_size=16", "sft.micro_batch_size=16", "sft.optimizer.lr=8e-3",
    "sft.optimizer.warmup_steps=0", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=10",
    "model.architecture.hidden_size=64", "model.architecture.intermediate_size=64",
    "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.every=1", "evaluation.bootstrap=10",
    "generation.part_size=12", "checkpoint.every_steps=2", "checkpoint.best=accuracy",
    "grpo.iterations=2", "grpo.problems_per_iteration=6", "grpo.minibatch_size=8", "grpo.epochs=3",
    "grpo.optimizer.lr=1e-3", "grpo.beta=0.1", "grpo.optimizer.warmup_steps=0", "grpo.dynamic_sampling=true",
    "idpo.iterations=2", "idpo.minibatch_size=3", "idpo.micro_batch_size=8", "idpo.optimizer.lr=1e-3",
    "idpo.reference=ema", "idpo.ema_decay=0.5", "idpo.schedule.kind=gradient-share", "idpo.problems_per_iteration=6",
    "~arms", "+arms={grpo: {alpha: 0.5}, idpo: {algorithm: idpo, exploration_coefficient: 0.05}}",
]
DEATHS = [
    ["nemo_edo.factory:write_builtin_files", 1],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 6],  # the warm-up; two steps are lost
    ["nemo_edo.megatron.checkpoint:write_checksums", 2],  # a checkpoint is half written
    ["nemo_edo.run_folder:RunFolder.write_evaluation", 1],
    ["nemo_edo.run_folder:RunFolder.note", 1],  # the warm-up is done, and nobody knows
    ["nemo_edo.generation.megatron_engine:MegatronEngine._batch", 4],  # the second part of GRPO's first collection
    ["nemo_edo.data.rollout_store:RolloutStore.write", 3],  # after the two of an evaluation
    ["nemo_edo.algorithms.grpo:GRPO.build", 1],
    ["nemo_edo.progress:write_collected", 1],
    ["nemo_edo.progress:SavedProgress._prune", 1],
    ["nemo_edo.models.megatron_gpt_exploring_model:MegatronGPTExploringModel.move_reference", 1],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 3],
    ["nemo_edo.stages:_save_trained", 1],
    ["nemo_edo.run_folder:RunFolder.remove_progress", 2],  # GRPO is done
    ["nemo_edo.algorithms.idpo:IDPO.build", 1],
    ["nemo_edo.models.megatron_gpt_exploring_model:MegatronGPTExploringModel.exploration_gradient_ratio", 1],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 1],
    ["nemo_edo.evaluation.run:Evaluator.evaluate", 1],
    ["nemo_edo.data.rollout_store:RolloutStore.write_part", 2],  # an evaluation is half drawn
    ["nemo_edo.runner:_conclude", 1],
    ["nemo_edo.run_folder:RunFolder.note", 1],  # everything is done, and nobody knows
]
"""Where a run of both trainers after a warm-up is killed, one after another, from its beginning to its end."""
DEATHS_BESIDE_A_WRITER = [
    ["nemo_edo.megatron.background:Writing.is_finished", 1],  # the writer has just begun
    ["nemo_edo.megatron.background:Writing.is_finished", 7],
    ["nemo_edo.megatron.checkpoint:write_checksums", 3],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 3],
    ["nemo_edo.progress:SavedProgress._prune", 2],
    ["nemo_edo.stages:_save_trained", 1],
]
"""Where a run that writes its checkpoints in the background is killed, one after another."""
LORA = ["lora.rank=4", "lora.alpha=8", "grpo.dynamic_sampling=false"]  # it learns too little to be right at times
DEATHS_WITH_LORA = [
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 15],
    ["nemo_edo.algorithms.idpo:IDPO.build", 2],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 2],
]
REQUESTS = [
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 5, "SIGTERM"],
    ["nemo_edo.generation.megatron_engine:MegatronEngine._batch", 6, "SIGTERM"],
    ["nemo_edo.evaluation.run:Evaluator.evaluate", 2, "SIGTERM"],
]
"""Where a run is asked to stop, one after another."""


def perform(folder: Path, commands: list[dict]) -> list[list[dict]]:
    """What came of each attempt at each command (tests/helpers/killed_runs.py)."""
    folder.mkdir(exist_ok=True)
    (folder / "in.json").write_text(json.dumps(commands))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(HELPER), str(folder / "in.json"), str(folder / "out.json")],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def weights(run: Path, arm: str) -> dict[str, torch.Tensor]:
    """Of a checkpoint, with Megatron's names."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, torch.Tensor] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(run / "checkpoints" / arm),
                     planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def rollouts(run: Path, arm: str, iteration: int) -> pd.DataFrame:
    return pd.read_parquet(run / "rollouts" / arm / f"iter_{iteration:05d}" / "rank_0_of_1.parquet")


def assert_same_end(run: Path, expected: Path) -> None:
    assert metrics(run) == metrics(expected)
    for arm in ("warmup", *ARMS):
        results = [(folder / "evaluations" / f"{arm}.json").read_bytes() for folder in (run, expected)]
        assert results[0] == results[1]
        mine, others = weights(run, arm), weights(expected, arm)
        assert mine.keys() == others.keys() and mine
        assert [name for name in mine if not torch.equal(mine[name], others[name])] == []
    for arm in ARMS:
        for iteration in range(2):
            short = [folder / "evaluations" / arm / f"iter_{iteration:05d}.json" for folder in (run, expected)]
            assert short[0].read_bytes() == short[1].read_bytes()
            pd.testing.assert_frame_equal(rollouts(run, arm, iteration), rollouts(expected, arm, iteration))
    assert json.loads((run / "samples.json").read_text()) == json.loads((expected / "samples.json").read_text())


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> list[str]:
    """Sums of two numbers, some of which the warm-up has wrong."""
    folder = tmp_path_factory.mktemp("problems")
    pairs = [(a, b) for a in range(1, 5) for b in range(1, 5)]

    def write(name: str, pairs: list[tuple[int, int]], off: int = 0) -> str:
        rows = [(f"{a} + {b}", a + b + (off if a == 2 else 0)) for a, b in pairs]
        lines = [json.dumps({"question": q, "answer": f"{q} = {total}\n#### {total}"}) for q, total in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        return f"data.{name}={folder / name}.jsonl"

    return [write("warmup", pairs, off=1), write("train", pairs[::2]), write("test", pairs[1::4])]


@pytest.fixture(scope="module")
def train(tmp_path_factory, problems):
    """train(name, *overrides, ends=[...]): a command for ``perform``. The runs stand in ``train.folder``."""
    folder = tmp_path_factory.mktemp("runs")

    def command(name: str, *overrides: str, ends=(), verb: str = "train") -> dict:
        return {"arguments": [verb, f"name={name}", f"output_dir={folder}", *SETTINGS, *problems, *overrides],
                "ends": list(ends)}

    command.folder = folder
    return command


@pytest.fixture(scope="module")
def runs(train) -> tuple[Path, dict[str, list[dict]]]:
    """The folder of all runs, and the attempts at each command."""
    draw = random.Random(0)
    plan = {
        "whole": train("whole"),
        "everywhere": train("everywhere", ends=DEATHS),
        "anywhere": train("anywhere", ends=[draw.randrange(10_000, 60_000) for _ in range(RANDOM_KILLS)]),
        "asked": train("asked", ends=REQUESTS),
        "in the background": train("in the background", "checkpoint.asynchronous=true", ends=DEATHS_BESIDE_A_WRITER),
        "lora": train("lora", *LORA),
        "lora and killed": train("lora and killed", *LORA, ends=DEATHS_WITH_LORA),
        "collected": train("collected", verb="collect"),
        "trained on collected": train("collected"),
        "given": train("given", f"train.rollouts={train.folder}/whole/rollouts"),
        "other settings": train("everywhere", "seed=1"),
    }
    return train.folder, dict(zip(plan, perform(train.folder, list(plan.values())), strict=True))


def test_a_run_killed_in_every_stage_ends_as_one_that_was_not(runs):
    folder, attempts = runs
    *killed, last = attempts["everywhere"]
    assert [attempt["status"] for attempt in killed] == [-9] * len(DEATHS), last["said"]
    assert last["status"] == 0, last["said"]
    assert_same_end(folder / "everywhere", folder / "whole")


@pytest.mark.parametrize(("name", "deaths", "whole"), [
    ("in the background", DEATHS_BESIDE_A_WRITER, "whole"), ("lora and killed", DEATHS_WITH_LORA, "lora")])
def test_a_run_killed_as_checkpoints_are_written_in_the_background_or_with_lora_ends_as_one_that_was_not(
    runs, name: str, deaths: list, whole: str
):
    folder, attempts = runs
    *killed, last = attempts[name]
    assert [attempt["status"] for attempt in killed] == [-9] * len(deaths), last["said"]
    assert last["status"] == 0, last["said"]
    assert_same_end(folder / name, folder / whole)


def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(runs):
    folder, attempts = runs
    *killed, last = attempts["anywhere"]
    assert len(killed) >= RANDOM_KILLS // 2
    assert last["status"] == 0, last["said"]
    assert_same_end(folder / "anywhere", folder / "whole")


@pytest.mark.skipif(WHOLE_QUICKSTART not in os.environ, reason=f"{WHOLE_QUICKSTART} is not set")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("config", "arms"), [
    ("quickstart", "{grpo: {alpha: 0}, ed_grpo_floor: {alpha: 300, log_ratio_floor: -0.1}}"),
    ("idpo_quickstart", "{ed_idpo: {exploration_coefficient: 0.1}}"),
])
def test_runs_of_the_quickstarts_size_killed_ten_times_end_as_ones_that_were_not(tmp_path, config: str, arms: str):
    draw = random.Random(config)

    def command(name: str, ends: list[float]) -> dict:
        return {"arguments": ["train", f"--config-name={config}", f"name={name}", f"output_dir={tmp_path}", "~arms",
                              f"+arms={arms}"], "ends": ends}

    begun = time.monotonic()
    [[whole]] = perform(tmp_path / "whole run", [command("whole", [])])
    seconds = time.monotonic() - begun
    assert whole["status"] == 0, whole["said"]
    [attempts] = perform(tmp_path / "killed run", [
        command("killed", [draw.uniform(1.0, seconds / 8) for _ in range(10)])])
    assert [attempt["status"] for attempt in attempts] == [-9] * 10 + [0], attempts[-1]["said"]
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    for checkpoint in (tmp_path / "whole" / "checkpoints").iterdir():
        mine, others = weights(tmp_path / "killed", checkpoint.name), weights(tmp_path / "whole", checkpoint.name)
        assert mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_run_that_is_asked_to_stop_saves_says_so_with_status_75_and_goes_on(runs):
    folder, attempts = runs
    *asked, last = attempts["asked"]
    assert [attempt["status"] for attempt in asked] == [os.EX_TEMPFAIL] * len(REQUESTS)
    assert all("the same command goes on from here" in attempt["said"] for attempt in asked)
    assert "going on with the unfinished run" in last["said"]
    assert_same_end(folder / "asked", folder / "whole")


def test_nothing_of_a_step_is_lost_to_sigterm(runs):
    """The first request comes in the fifth step, when the fourth was the last to be saved."""
    said = runs[1]["asked"][0]["said"]
    assert "everything up to step 5 of this stage is saved" in said


def test_collect_writes_rollouts_that_training_finds_and_uses(runs):
    folder, attempts = runs
    assert [attempts[name][0]["status"] for name in ("collected", "trained on collected")] == [0, 0]
    assert f"rollouts of arm grpo: {folder / 'collected' / 'rollouts' / 'grpo'}" in attempts["collected"][0]["said"]
    assert_same_end(folder / "collected", folder / "whole")


def test_training_on_another_runs_rollouts_ends_as_that_run_did(runs):
    folder, attempts = runs
    assert attempts["given"][0]["status"] == 0, attempts["given"][0]["said"]
    assert_same_end(folder / "given", folder / "whole")


def test_a_finished_run_leaves_the_final_and_the_best_checkpoints_alone(runs):
    folder, _ = runs
    for run in ("whole", "everywhere", "in the background"):
        found = sorted(path.name for path in (folder / run / "checkpoints").iterdir())
        assert found == ["grpo", "grpo.best", "idpo", "idpo.best", "warmup"]
        about = json.loads((folder / run / "checkpoints" / "idpo.best" / "about.json").read_text())["extra"]
        evaluated = [line["metrics"]["accuracy"]["mean"] for line in metrics(folder / run)
                     if (line["kind"], line["arm"]) == ("evaluation", "idpo")]
        assert about == {"metric": "accuracy", "value": max(evaluated), "iteration": evaluated.index(max(evaluated))}


def test_settings_that_may_not_change_are_named_with_both_values(runs):
    said = runs[1]["other settings"][0]
    assert said["status"] == 2
    assert "exists already with another config: seed is 42 there and 1 here" in said["said"]


# --- two processes ------------------------------------------------------------------------------------------------


def torchrun(folder: Path, command: dict) -> subprocess.Popen:
    """The command on two processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                             "-m", "nemo_edo", *command["arguments"]], env=environment,
                            stdout=(folder / "said").open("a"), stderr=subprocess.STDOUT)


def wait_for(run: Path, kind: str, count: int) -> None:
    """Until the run has logged so many lines of a kind."""
    path, deadline = run / "metrics.jsonl", time.monotonic() + 600
    while not path.is_file() or path.read_text().count(f'"kind": "{kind}"') < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers(launcher: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children(recursive=True)


LAYOUTS = {
    "data": ["parallelism.use_distributed_optimizer=true"],
    "tensor": ["parallelism.tensor_model_parallel_size=2"],
    "pipeline": ["parallelism.pipeline_model_parallel_size=2", "checkpoint.asynchronous=true"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_whose_torchrun_is_killed_end_with_it_and_then_as_two_that_were_not(train, tmp_path, layout: str):
    """torchrun alone is killed: the next one finds the run's folder free."""
    settings = [*LAYOUTS[layout], "sft.steps=60"]
    whole, stopped = train(f"two {layout}", *settings), train(f"two {layout} killed", *settings)
    run = train.folder / f"two {layout} killed"
    assert torchrun(tmp_path, whole).wait() == 0, (tmp_path / "said").read_text()[-3000:]
    launcher = torchrun(tmp_path, stopped)
    wait_for(run, "sft_step", 13)
    doomed = workers(launcher)
    assert len(doomed) >= 2
    launcher.kill()
    launcher.wait()
    assert psutil.wait_procs(doomed, timeout=10)[1] == []
    assert torchrun(tmp_path, stopped).wait() == 0, (tmp_path / "said").read_text()[-3000:]
    assert (tmp_path / "said").read_text().count("going on with the unfinished run") == 1
    assert_same_end(run, train.folder / f"two {layout}")


def test_two_processes_asked_to_stop_go_on_as_one_with_the_optimizer_that_they_had(train, tmp_path):
    """torchrun hands the signal on. The sums of one process round otherwise than those of two."""
    run, settings = train.folder / "fewer", [*LAYOUTS["data"], "sft.steps=60"]
    launcher = torchrun(tmp_path, train("fewer", *settings))
    wait_for(run, "sft_step", 13)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait() != 0
    assert (tmp_path / "said").read_text().count("the same command goes on from here") == 1
    [[attempt]] = perform(tmp_path / "one", [train("fewer", *settings)])
    assert attempt["status"] == 0, attempt["said"]
    assert "data-parallel size is 2 there and 1 here" in attempt["said"]
    losses = [line["loss"] for line in metrics(run) if line["kind"] == "sft_step"]
    expected = [line["loss"] for line in metrics(train.folder / "two data") if line["kind"] == "sft_step"]
    assert losses == pytest.approx(expected, abs=1e-4)
    assert (run / "report.html").exists()
