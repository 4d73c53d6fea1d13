"""A run with minibatches with an advantage of NaN: skipped, stopped, replayed, killed and resumed; and an evaluation
and an export of it that are killed."""

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
from helpers.endings import ending, metrics
from helpers.kills import attempts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = [
    "sft.steps=4", "sft.batch_size=8", "sft.micro_batch_size=8", "sft.optimizer.warmup_steps=0",
    "model.architecture.hidden_size=64", "model.architecture.intermediate_size=64",
    "data.arithmetic.warmup_problems=16", "data.arithmetic.train_problems=6", "data.arithmetic.test_problems=4",
    "data.arithmetic.num_operands=2", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=6",
    "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10", "checkpoint.every_steps=1",
    "grpo.iterations=1", "grpo.problems_per_iteration=null", "grpo.minibatch_size=4", "grpo.micro_batch_size=2",
    "grpo.optimizer.warmup_steps=0", "guards.truncated.ceiling=null", "~arms",
    "replicate_baseline=false", "+arms={grpo: {alpha: 0.5}}",
]
STEP = "nemo_edo.megatron.policy:MegatronPolicy.apply_gradients"
BROKEN_ROW = 1
"""Of a minibatch of four."""
ONE, THREE = ["42 0 0 1"], ["42 0 0 1", "42 0 0 2", "42 0 0 3"]


def break_minibatches(seeds: list[str]) -> None:
    """In the run's process: minibatches with these seeds ("RUN'S ITERATION EPOCH PLACE") have an advantage of NaN."""
    from nemo_edo.algorithms.grpo import GRPO

    whole = GRPO.minibatch

    def minibatch(self, collected, items, seed: str):
        batch = whole(self, collected, items, seed)
        if seed not in seeds:
            return batch
        advantages = batch.advantages.clone()
        advantages[BROKEN_ROW] = math.nan
        return batch.with_fields(advantages=advantages)

    GRPO.minibatch = minibatch


@pytest.fixture(scope="module")
def runs(tmp_path_factory, nemo_edo) -> tuple[Path, dict[str, list[dict]]]:
    """The folder of all runs, and the attempts at each command (helpers.kills)."""
    folder = tmp_path_factory.mktemp("runs")

    def run(*arguments: str, broken: list[str] = (), ends=()) -> list[dict]:
        return attempts(nemo_edo, arguments, ends, [("tests.e2e.test_guards:break_minibatches", broken)])

    def train(name: str, broken: list[str], *overrides: str, ends=()) -> list[dict]:
        return run("train", f"name={name}", f"output_dir={folder}", *SETTINGS, *overrides, broken=broken, ends=ends)

    return folder, {
        "whole": train("whole", ONE),
        # Before the broken step is done, and behind it.
        "killed": train("killed", ONE, ends=[[STEP, 6], [STEP, 2]]),
        "stopped": train("stopped", THREE, "guards.max_skipped_steps=2"),
        "replay": run("replay", f"{folder}/stopped/failures/grpo_step_00000002.safetensors"),
        "with another guard": train("stopped", THREE, "guards.max_skipped_steps=9"),
    }


def test_a_run_continues_after_a_broken_step_and_counts_it(runs):
    folder, attempts = runs
    assert attempts["whole"][0]["status"] == 0, attempts["whole"][0]["said"]
    steps = metrics(folder / "whole", "train_step")
    assert [step["skipped_steps"] for step in steps] == [0, 1, 1, 1, 1, 1]
    assert [step["loss"] is None for step in steps] == [False, True, False, False, False, False]
    [guard] = metrics(folder / "whole", "guard")
    assert (guard["arm"], guard["step"], guard["action"]) == ("grpo", 1, "skip")


def test_a_run_killed_around_a_skipped_step_ends_as_one_that_was_not(runs):
    folder, attempts = runs
    *killed, last = attempts["killed"]
    assert [attempt["status"] for attempt in killed] == [-9] * 2 and last["status"] == 0, last["said"]
    assert ending(folder / "killed") == ending(folder / "whole")


def test_so_many_broken_steps_in_a_row_end_the_run_with_a_separate_status(runs):
    [stopped] = runs[1]["stopped"]
    assert stopped["status"] == 3, stopped["said"]
    assert "stopped by a guard: grpo, iteration 0, step 2: the loss is nan" in stopped["said"]
    assert "grpo_step_00000002.safetensors" in stopped["said"] and "Traceback" not in stopped["said"]


def test_a_replay_finds_the_response_that_broke_the_step(runs):
    [replayed] = runs[1]["replay"]
    assert replayed["status"] == 0, replayed["said"]
    said = replayed["said"].splitlines()
    assert any(line.startswith("step 2 of grpo, with 4 responses, was not taken: loss nan") for line in said)
    assert any(line.startswith("now: ") and "loss nan" in line for line in said)
    [row] = [line for line in said if line.startswith("row ")]
    assert row.startswith("row 1: given: advantages; computed: loss, ")
    assert "the loss says: advantages has NaN" in row


def test_a_stopped_run_ends_once_its_guard_is_changed(runs):
    folder, attempts = runs
    [changed] = attempts["with another guard"]
    assert changed["status"] == 0, changed["said"]
    steps = metrics(folder / "stopped", "train_step")
    assert [step["step"] for step in steps] == list(range(6))
    assert [step["skipped_steps"] for step in steps] == [0, 1, 2, 3, 3, 3]


# --- commands on a finished run -----------------------------------------------------------------------------------


def killed(nemo_edo, command: list[str], end: list) -> None:
    """A command that is killed at its END (helpers.kills)."""
    done = nemo_edo(*command, before=[("helpers.kills:prepare", end)])
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def responses(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (run / "evaluations").rglob("rank_*.parquet")}


def test_an_evaluation_that_is_killed_leaves_the_stored_responses_until_it_has_its_own(runs, tmp_path, nemo_edo):
    whole = shutil.copytree(runs[0] / "whole", tmp_path / "whole")
    stored, command = responses(whole), ["evaluate", str(whole), "evaluation.rollouts=2"]
    killed(nemo_edo, command, ["nemo_edo.rollouts.store:RolloutStore.write", 2])
    assert stored.items() <= responses(whole).items()
    nemo_edo.succeed("evaluate", str(whole), "--stored")
    nemo_edo.succeed(*command)
    assert stored.keys() == responses(whole).keys() and stored != responses(whole)
    assert json.loads((whole / "journal.json").read_text())["warmup"]["evaluated_again"]  # and no other run adopts it
    assert "greedy and 2 x " in (whole / "report.html").read_text()


def test_an_evaluation_on_other_problems_than_the_stored_ones_is_refused_before_it_generates(runs, nemo_edo):
    before = responses(runs[0] / "whole")
    done = nemo_edo("evaluate", str(runs[0] / "whole"), "--arm=grpo", "evaluation.limit=2")
    assert done.returncode == 2 and "warmup.json were evaluated on different problems (2 and 4)" in done.stderr
    done = nemo_edo("evaluate", str(runs[0] / "whole"), "--arm=grpo", "evaluation.samples=3")
    assert done.returncode == 2 and "evaluation.samples is 3 in the one and " in done.stderr
    assert responses(runs[0] / "whole") == before


def test_an_export_that_is_killed_leaves_nothing_that_looks_whole_and_can_be_repeated(runs, tmp_path, nemo_edo):
    out = tmp_path / "exported"
    command = ["export", str(runs[0] / "whole"), str(out), "--arm=grpo"]
    killed(nemo_edo, command, ["nemo_edo.megatron.hf_export:save_file", 1])
    assert not out.exists()
    nemo_edo.succeed(*command)
    assert (out / "model.safetensors").is_file() and (out / "config.json").is_file()
    assert list(tmp_path.iterdir()) == [out]
