"""A run that is killed and resumes ends with the numbers of one that was not killed, wherever that happens."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers.cli import start
from helpers.endings import ending, metrics
from helpers.kills import attempts
from helpers.problem_files import write_sums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = [
    "sft.steps=24", "sft.batch_size=16", "sft.micro_batch_size=16", "sft.optimizer.lr=8e-3",
    "sft.optimizer.warmup_steps=0", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=10",
    "model.architecture.hidden_size=64", "model.architecture.intermediate_size=64",
    "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.every=1", "evaluation.bootstrap=10",
    "generation.part_size=12", "checkpoint.every_steps=2", "checkpoint.best=accuracy", "checkpoint.best_count=2",
    "grpo.iterations=2", "grpo.problems_per_iteration=6", "grpo.minibatch_size=8", "grpo.epochs=3",
    "grpo.optimizer.lr=1e-3", "grpo.beta=0.1", "grpo.optimizer.warmup_steps=0", "grpo.dynamic_sampling=true",
    "idpo.iterations=2", "idpo.minibatch_size=3", "idpo.micro_batch_size=8", "idpo.optimizer.lr=1e-3",
    "idpo.reference=ema", "idpo.ema_decay=0.5", "idpo.schedule.kind=gradient-share", "idpo.problems_per_iteration=6",
    "~arms",
    "replicate_baseline=false", "+arms={grpo: {alpha: 0.5}, idpo: {algorithm: idpo, exploration_coefficient: 0.05}}",
]
DEATHS = [
    ["nemo_edo.run.inputs:write_builtin_files", 1],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 5, "SIGTERM"],  # the fourth step was saved last
    ["nemo_edo.megatron.background:Writing.is_finished", 1],  # a checkpoint's writer has just begun
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 6],  # the warm-up; two steps are lost
    ["nemo_edo.megatron.checkpoint:write_checksums", 2],  # a checkpoint is half written
    ["nemo_edo.run_folder:RunFolder.write_evaluation", 1],
    ["nemo_edo.run_folder:RunFolder.note", 1],  # the warm-up is done, and nobody knows
    ["nemo_edo.rewards.verifier:ExactAnswerScorer.score", 4],  # the second part of GRPO's first collection
    ["nemo_edo.rewards.verifier:ExactAnswerScorer.score", 1, "SIGTERM"],  # that part again
    ["nemo_edo.rollouts.store:RolloutStore.write", 3],  # after the two of an evaluation
    ["nemo_edo.run.resume:write_batch", 1],
    ["*/checkpoints/grpo.progress/step_????????", 3],  # after the two events of its being put in place
    ["nemo_edo.models.megatron_gpt_exploring_model:MegatronGPTExploringModel.move_reference", 1],
    ["*/checkpoints/grpo", 1],  # GRPO is trained, and its weights are not yet saved
    ["nemo_edo.run_folder:RunFolder.remove_progress", 2],  # GRPO is done
    ["nemo_edo.models.megatron_gpt_exploring_model:MegatronGPTExploringModel.exploration_gradient_ratio", 1],
    ["nemo_edo.rollouts.store:RolloutStore.write_part", 2],  # an evaluation is half sampled
    ["nemo_edo.report.page:write_report", 1],
    ["nemo_edo.run_folder:RunFolder.note", 1],  # everything is done, and nobody knows
]
"""Where a run of both trainers after a warm-up is killed or asked to stop, one after another, from its beginning to
its end."""
STOPPED_EARLY = [
    "lora.rank=4", "lora.alpha=8", "grpo.dynamic_sampling=false",  # with LoRA it learns too little to be right at times
    "grpo.iterations=4", "early_stop.metric=accuracy", "early_stop.patience=1",
    "early_stop.min_delta=2",  # no accuracy rises by 2: both arms stop at iteration 1
]
DEATHS_AROUND_AN_EARLY_STOP = [
    ["nemo_edo.run_folder:RunFolder.write_evaluation", 3],  # of the warm-up, and before the iterations 0 and 1
    ["*/checkpoints/grpo", 1],  # the policy that the stop has left is not yet saved
    ["nemo_edo.rollouts.store:RolloutStore.write_part", 2],
    ["nemo_edo.megatron.policy:MegatronPolicy.apply_gradients", 2],
]


def assert_same_end(run: Path, expected: Path) -> None:
    found, others = ending(run), ending(expected)
    assert [name for name in found.keys() | others.keys() if found.get(name) != others.get(name)] == []


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> list[str]:
    """Sums of two numbers, some of which the warm-up has wrong."""
    return write_sums(tmp_path_factory.mktemp("problems"), lambda a, b: a == 2, tested=4)


@pytest.fixture(scope="module")
def train(tmp_path_factory, problems):
    """train(name, *overrides): the arguments of a run. The runs are in ``train.folder``."""
    folder = tmp_path_factory.mktemp("runs")

    def command(name: str, *overrides: str, verb: str = "train") -> list[str]:
        return [verb, f"name={name}", f"output_dir={folder}", *SETTINGS, *problems, *overrides]

    command.folder = folder
    return command


@pytest.fixture(scope="module")
def runs(train, nemo_edo) -> tuple[Path, dict[str, list[dict]]]:
    """The folder of all runs, and the attempts at each command (helpers.kills)."""
    plan = {
        "whole": (train("whole"), []),
        "everywhere": (train("everywhere"), DEATHS),
        "early": (train("early", *STOPPED_EARLY), []),
        "early and killed": (train("early and killed", *STOPPED_EARLY), DEATHS_AROUND_AN_EARLY_STOP),
        "given": (train("given", f"train.rollouts={train.folder}/whole/rollouts"), []),
    }
    return train.folder, {name: attempts(nemo_edo, command, ends) for name, (command, ends) in plan.items()}


def test_a_run_killed_and_asked_to_stop_in_every_stage_ends_as_one_that_was_not(runs):
    folder, attempts = runs
    *ended, last = attempts["everywhere"]
    assert [attempt["status"] for attempt in ended] == [os.EX_TEMPFAIL if "SIGTERM" in end else -9 for end in DEATHS]
    assert last["status"] == 0 and "resuming the unfinished run" in last["said"], last["said"]
    asked = [" ".join(attempt["said"].split()) for attempt in ended if attempt["status"] == os.EX_TEMPFAIL]
    assert all("the same command resumes the run" in said for said in asked)
    assert "everything up to step 5 of this stage saved" in asked[0]
    assert_same_end(folder / "everywhere", folder / "whole")


def test_a_run_with_lora_killed_around_an_early_stop_stops_there_again(runs):
    folder, attempts = runs
    *killed, last = attempts["early and killed"]
    assert [attempt["status"] for attempt in killed] == [-9] * len(DEATHS_AROUND_AN_EARLY_STOP), last["said"]
    assert last["status"] == 0, last["said"]
    assert "stopped after 1 of 4 iterations" in " ".join(attempts["early"][0]["said"].split())
    assert not (folder / "early and killed" / "rollouts" / "grpo" / "iter_00001").exists()
    assert_same_end(folder / "early and killed", folder / "early")


def test_collect_writes_rollouts_that_training_uses_and_leaves_a_run_that_was_stopped_within_an_arm_to_resume(
    runs, train, nemo_edo
):
    """And each stage has its own time."""
    run, command, collect = train.folder / "collected", train("collected"), train("collected", verb="collect")
    assert f"rollouts of arm grpo: {run / 'rollouts' / 'grpo'}" in nemo_edo.succeed(*collect)
    end = ["nemo_edo.run.resume:write_batch", 1, "SIGTERM"]
    assert nemo_edo(*command, before=[("helpers.kills:prepare", end)]).returncode == os.EX_TEMPFAIL
    logged = (run / "metrics.jsonl").read_bytes()
    nemo_edo.succeed(*collect)
    assert (run / "metrics.jsonl").read_bytes().startswith(logged)
    nemo_edo.succeed(*command)
    assert_same_end(run, train.folder / "whole")
    seconds = json.loads((run / "summary.json").read_text())["time"]
    assert sum(seconds.values()) < 2 * seconds["total_s"] + 1


def test_training_on_another_runs_rollouts_ends_as_that_run_did(runs):
    folder, attempts = runs
    assert attempts["given"][0]["status"] == 0, attempts["given"][0]["said"]
    assert_same_end(folder / "given", folder / "whole")


def test_a_finished_run_leaves_the_final_and_the_best_checkpoints_alone(runs):
    folder, _ = runs
    for run in ("whole", "everywhere"):
        found = sorted(path.name for path in (folder / run / "checkpoints").iterdir())
        evaluated = [line["metrics"]["accuracy"]["mean"] for line in metrics(folder / run, "evaluation")
                     if line["arm"] == "idpo"]
        best = sorted(range(len(evaluated)), key=lambda t: -evaluated[t])[:2]
        names = ["idpo.best", f"idpo.best_iter_{best[1]:05d}"]
        assert [name for name in found if "idpo.best" in name] == names
        assert {name for name in found if ".best" not in name} == {"grpo", "idpo", "warmup"}
        for name, t in zip(names, best, strict=True):
            about = json.loads((folder / run / "checkpoints" / name / "about.json").read_text())["extra"]
            assert about == {"metric": "accuracy", "value": evaluated[t], "iteration": t}


def wait_for_steps(launcher: subprocess.Popen, run: Path, count: int) -> None:
    """Until the run has logged so many steps of its warm-up."""
    path, deadline = run / "metrics.jsonl", time.monotonic() + 600
    while not path.is_file() or path.read_text().count('"kind": "sft_step"') < count:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


TWO = ["arms={grpo: {alpha: 0.5}}", "sft.steps=40", "grpo.iterations=1", "parallelism.use_distributed_optimizer=true"]
"""Data parallelism. A pipeline resumes in tests/distributed, and tensor parallelism in tests/slurm at a lost node."""


def test_two_processes_that_were_killed_and_asked_to_stop_resume_as_one_with_the_optimizer_that_they_had(
    train, tmp_path, nemo_edo
):
    """tests/chaos compares two processes that are killed with two that are not, to the last bit. The sums of one
    process round differently."""
    run, command, said = train.folder / "fewer", train("fewer", *TWO), tmp_path / "said"
    output = {"stdout": said.open("a"), "stderr": subprocess.STDOUT}
    launcher = start(*command, processes=2, **output)
    wait_for_steps(launcher, run, 7)
    workers = psutil.Process(launcher.pid).children(recursive=True)
    assert len(workers) >= 2
    launcher.kill()  # torchrun alone: its workers end with it, and the next one finds the run's folder free
    launcher.wait()
    assert psutil.wait_procs(workers, timeout=10)[1] == []

    launcher = start(*command, processes=2, **output)
    wait_for_steps(launcher, run, 15)
    launcher.send_signal(signal.SIGTERM)  # which torchrun hands on
    assert launcher.wait() != 0
    for words in ("resuming the unfinished run", "nemo-edo: SIGTERM: stopping after this step, to save it",
                  "the same command resumes the run"):
        assert said.read_text().count(words) == 1

    resumed, whole = nemo_edo.succeed(*command), nemo_edo.succeed(*train("one", *TWO))
    assert "data-parallel size is 2 there and 1 here" in resumed and "unfinished" not in whole
    losses = [[line["loss"] for line in metrics(train.folder / name, "sft_step")] for name in ("fewer", "one")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert (run / "report.html").exists()
