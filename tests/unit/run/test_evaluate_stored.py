"""Evaluation of run folders from what is stored in them."""

import random
import shutil
from pathlib import Path

import pytest
from helpers.stored_run import EACH, write_stored_run

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import load_evaluation
from nemo_edo.rollouts.store import RolloutStore, ScoreStore, StepScores, rollouts_checksum
from nemo_edo.run.policy_evaluation import evaluate_stored
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import ScoredRollout

SETTINGS = [f"evaluation.samples={EACH}", "evaluation.bootstrap=50"]


def write_run(folder: Path) -> RunFolder:
    return RunFolder(write_stored_run(folder, iterations=1, arms=("grpo", "ed_grpo")))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "first")


def sampled(run: RunFolder, arm: str) -> list[ScoredRollout]:
    return RolloutStore(run.evaluated(arm, "sampled")).read(int(arm != "warmup"))


def write_scores(run: RunFolder, arm: str, name: str, low: float = 0.0) -> None:
    rng, written = random.Random(0), sampled(run, arm)
    scores = {(one.rollout.problem_id, one.rollout.sample_index): StepScores((9 * rng.random(), low + rng.random()))
              for one in written}
    ScoreStore(run.scores(arm, name)).write("sampled", scores, rollouts=rollouts_checksum(written), made_by="prm")


def test_every_evaluated_arm_gets_its_file_and_is_compared_with_the_runs_baseline(run: RunFolder):
    lines = evaluate_stored([run.path], None, SETTINGS)
    for arm in ("warmup", "grpo", "ed_grpo"):
        evaluation = load_evaluation(run.test_time(arm))
        rewards = [one.reward for one in sampled(run, arm)]
        sums, counts = evaluation.metrics["accuracy"]
        assert (evaluation.arm, sums.sum(), counts.sum()) == (arm, sum(rewards), len(rewards))
        assert f"written: {run.test_time(arm)}" in lines
    assert any(line.startswith("differences from warmup") for line in lines)
    run.write_json("summary.json", {"baseline": "grpo"})
    lines = "\n".join(evaluate_stored([run.path], None, SETTINGS))
    assert "differences from grpo" in lines and "  ed_grpo  " in lines


def test_several_runs_are_compared_problem_by_problem(run: RunFolder, tmp_path: Path):
    second, same_name = write_run(tmp_path / "second"), write_run(tmp_path / "other" / "first")
    lines = "\n".join(evaluate_stored([run.path, second.path], "ed_grpo", SETTINGS))
    assert "first/ed_grpo: 8 problems" in lines and "differences from first/ed_grpo" in lines
    lines = "\n".join(evaluate_stored([run.path, same_name.path], "ed_grpo", SETTINGS))
    assert f"{same_name.path}/ed_grpo" in lines


def test_scores_of_these_responses_make_curves_and_those_of_others_are_left_out_and_named(run: RunFolder, tmp_path):
    write_scores(run, "ed_grpo", "prm")
    write_scores(run, "ed_grpo", "logits", low=-5.0)
    write_scores(run, "grpo", "prm")
    again = write_run(tmp_path / "again").evaluated("grpo", "sampled")
    shutil.copytree(again, run.evaluated("grpo", "sampled"), dirs_exist_ok=True)  # evaluated again since
    lines = "\n".join(evaluate_stored([run.path], None, SETTINGS))
    found = load_evaluation(run.test_time("ed_grpo")).metrics
    assert {f"best_of@{EACH}/prm", "weighted@2/prm", "best_of@1/logits"} <= found.keys()
    assert "weighted@2/logits" not in found and "weighted@k/logits of ed_grpo: left out" in lines
    assert not [name for name in load_evaluation(run.test_time("grpo")).metrics if "prm" in name]
    assert f"{run.scores('grpo', 'prm') / 'sampled.parquet'}: left out: it scores other responses" in lines


@pytest.mark.parametrize(("overrides", "arm", "named"), [
    ([], "third", "no arm 'third'; it has warmup, grpo, ed_grpo"),
    (["evaluation.samples=3"], None, "5 responses .*evaluation.samples=3"),
    (["evaluation.vote_subsets=0"], None, "evaluation.vote_subsets is 0"),
])
def test_what_does_not_fit_is_an_error(run: RunFolder, overrides, arm, named: str):
    with pytest.raises(UserError, match=named):
        evaluate_stored([run.path], arm, [*SETTINGS, *overrides])
