"""What an arm has left is looked at as a run resumes."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.stored_run import write_stored_run

from nemo_edo.config import RunConfig
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS, Evaluation
from nemo_edo.megatron.checkpoint import write_checksums
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run import stages
from nemo_edo.run.stages import check_arm, check_trained
from nemo_edo.run.stored_run import open_run
from nemo_edo.run_folder import RunFolder


@pytest.fixture(scope="module")
def whole(one_rank, tmp_path_factory) -> Path:
    """A finished arm of two iterations, evaluated before each of them and at the end."""
    run = open_run(write_stored_run(tmp_path_factory.mktemp("runs") / "run"))
    folder, policies = run.folder, run.policies
    for policy in policies:
        results = Evaluation.of_rows(policy, ["p"], [{"greedy_accuracy": (1.0, 1.0)}])
        folder.write_evaluation(results)
        folder.write_json(folder.test_time(policy), results.record())
        for iteration in (0, 1) if policy == "grpo" else ():
            folder.write_evaluation(results, iteration)
            for kind in KINDS:
                final = RolloutStore(folder.evaluated(policy, kind))
                final.write(iteration, final.read(2))
    for checkpoint in folder.checkpoint("warmup"), folder.checkpoint("grpo"), folder.best_checkpoint("grpo"):
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"0123")
        write_checksums(checkpoint, {})
    return folder.path


def kept(path: Path, **settings) -> tuple[RunConfig, RunFolder]:
    run = open_run(path, ["evaluation.every=1"])
    arms = {"grpo": {"iterations": 2, **settings}}
    return replace(run.cfg, arms=arms, replicate_baseline=False), run.folder


PLACES: dict[str, tuple[Callable, dict, bool]] = {
    "in training": (check_arm, {"iteration": 1, "is_within": True}, False),
    "trained": (check_arm, {"iteration": 2}, False),
    "finished": (check_trained, {"final": True}, True),
}
FILES = {
    "rollouts/grpo/iter_00000/rank_0_of_1.parquet": False,
    "evaluations/grpo/greedy/iter_00000/rank_0_of_1.parquet": False,
    "evaluations/grpo/sampled/iter_00001/rank_0_of_1.parquet": False,
    "evaluations/grpo/iter_00001.json": True,
    "checkpoints/grpo.best/weights": True,
}
"""Whether the run cannot do without."""
OF_THE_END = {
    "evaluations/grpo.json": True,
    "test_time/grpo.json": True,
    "checkpoints/grpo/weights": True,
    "evaluations/grpo/sampled/iter_00002/rank_0_of_1.parquet": False,
}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize("place", PLACES)
def test_what_an_arm_has_left_and_is_lost_is_named_wherever_the_run_resumes(
        whole: Path, tmp_path, recwarn, place: str, damage):
    check, where, is_end = PLACES[place]
    path = shutil.copytree(whole, tmp_path / "run")
    check(*kept(path), "grpo", **where)
    assert not [one for one in recwarn if "missing or damaged" in str(one.message)]
    for name, is_needed in (FILES | OF_THE_END if is_end else FILES).items():
        damage(path / name)
        if is_needed:
            with pytest.raises(UserError, match=str((path / name).parent)) as said:
                check(*kept(path), "grpo", **where)
            assert "restore it" in str(said.value)
        else:
            with pytest.warns(UserWarning, match=f"{(path / name).parent}.* is missing or damaged"):
                check(*kept(path), "grpo", **where)
        shutil.copy(whole / name, path / name)


@pytest.mark.parametrize(("samples", "place", "is_needed"), [
    ("previous", {"iteration": 1}, True), ("reference", {"iteration": 1}, True),
    ("previous", {"iteration": 1, "is_within": True}, False),  # the iteration's batch is kept, and the next reads 1
    ("reference", {"iteration": 2}, False), ("own", {"iteration": 1}, False),
])
def test_rollouts_that_the_exploration_term_will_run_over_are_needed(whole: Path, tmp_path, samples, place, is_needed):
    path = shutil.copytree(whole, tmp_path / "run")
    (path / "rollouts/grpo/iter_00000/rank_0_of_1.parquet").unlink()
    with pytest.raises(UserError, match="the exploration term runs over it; restore it") if is_needed else (
            pytest.warns(UserWarning, match="iter_00000.* is missing or damaged; training and results no longer need")):
        check_arm(*kept(path, exploration_samples=samples), "grpo", **place)


def test_an_arm_that_has_stopped_early_needs_no_rollouts_for_an_iteration_that_will_not_be(
        whole: Path, tmp_path, monkeypatch):
    path = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(path / "rollouts/grpo/iter_00001")
    monkeypatch.setattr(stages, "trained_iterations", lambda *_: 1)
    check_trained(*kept(path, exploration_samples="previous"), "grpo")


def test_another_s_config_that_asks_for_a_variable_of_this_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    config = write_stored_run(tmp_path / "run") / "config.yaml"
    config.write_text(config.read_text().replace("name: run", "name: ${oc.env:SECRET}"))
    with pytest.raises(UserError, match=r"config.yaml: name is '\$\{oc.env:SECRET\}'"):
        open_run(tmp_path / "run")
