"""Evaluation of run folders from what is stored in them."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.responses import scored

from nemo_edo.config import EvaluationConfig, RunConfig
from nemo_edo.config.compose import compose_run, resolved_yaml
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import Evaluation, load_evaluation
from nemo_edo.rollouts.store import RolloutStore, ScoreStore, StepScores, rollouts_checksum
from nemo_edo.run.policy_evaluation import evaluate_stored
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import ScoredRollout

PROBLEMS, SAMPLES, ITERATIONS = 9, 4, 2
ARMS = {"plain": 0.4, "better": 0.8}


def responses(arm: str, samples: int, seed: int) -> list[ScoredRollout]:
    rng, found = random.Random(f"{arm} {seed}"), []
    for problem in range(PROBLEMS):
        for sample in range(samples):
            right = rng.random() < ARMS.get(arm, 0.2)
            ids = tuple(rng.choices(range(9), k=rng.randint(4, 8)))
            answer = "1" if right else rng.choice("23")
            found.append(scored(f"test-{problem}", sample, ids, float(right), answer=answer, policy_version=2))
    return found


@pytest.fixture(scope="module")
def config() -> RunConfig:
    arms = {"plain": {"alpha": 0}, "better": {"alpha": 1e-3}}
    cfg = compose_run("quickstart", [f"grpo.iterations={ITERATIONS}"])
    return replace(cfg, arms=arms, evaluation=EvaluationConfig(samples=SAMPLES, rollouts=1, bootstrap=50))


def write_run(folder: Path, config: RunConfig, seed: int = 0, arms=("warmup", *ARMS)) -> RunFolder:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    run = RunFolder(folder)
    for arm in arms:
        store(run, arm, seed)
    return run


def store(run: RunFolder, arm: str, seed: int) -> None:
    """As an evaluation of the arm leaves it."""
    for kind, samples in (("greedy", 1), ("sampled", SAMPLES)):
        written = responses(arm, samples, seed)
        RolloutStore(run.evaluated(arm, kind)).write(ITERATIONS if arm in ARMS else 0, written)
    run.write_evaluation(Evaluation(arm, ("test-0",), {"accuracy": (np.ones(1), np.ones(1))}))


@pytest.fixture
def run(tmp_path: Path, config) -> RunFolder:
    return write_run(tmp_path / "first", config)


def write_scores(run: RunFolder, arm: str, name: str, low: float = 0.0) -> None:
    sampled = RolloutStore(run.evaluated(arm, "sampled")).read(ITERATIONS)
    rng = random.Random(0)
    scores = {(one.rollout.problem_id, one.rollout.sample_index): StepScores((9 * rng.random(), low + rng.random()))
              for one in sampled}
    ScoreStore(run.scores(arm, name)).write("sampled", scores, rollouts=rollouts_checksum(sampled), made_by="prm")


def test_every_evaluated_arm_gets_its_file_and_is_compared_with_the_runs_baseline(run: RunFolder):
    lines = evaluate_stored([run.path], None, [])
    for arm in ("warmup", *ARMS):
        evaluation = load_evaluation(run.test_time(arm))
        rewards = [one.reward for one in responses(arm, SAMPLES, 0)]
        sums, counts = evaluation.metrics["accuracy"]
        assert (evaluation.arm, sums.sum(), counts.sum()) == (arm, sum(rewards), len(rewards))
        assert f"written: {run.test_time(arm)}" in lines
    assert any(line.startswith("differences from warmup") for line in lines)
    run.write_json("summary.json", {"baseline": "plain"})
    lines = "\n".join(evaluate_stored([run.path], None, []))
    assert "differences from plain" in lines and "  better  " in lines


def test_several_runs_are_compared_problem_by_problem(run: RunFolder, tmp_path: Path, config):
    second = write_run(tmp_path / "second", config, seed=1)
    lines = "\n".join(evaluate_stored([run.path, second.path], "better", []))
    assert "first/better: 9 problems" in lines and "differences from first/better" in lines
    same_name = write_run(tmp_path / "other" / "first", config, seed=1)
    assert f"{same_name.path}/better" in "\n".join(evaluate_stored([run.path, same_name.path], "better", []))


def test_scores_of_these_responses_make_curves_and_those_of_others_are_left_out_and_named(run: RunFolder):
    write_scores(run, "better", "prm")
    write_scores(run, "better", "logits", low=-5.0)
    write_scores(run, "plain", "prm")
    store(run, "plain", seed=5)  # evaluated again since
    lines = "\n".join(evaluate_stored([run.path], None, []))
    found = load_evaluation(run.test_time("better")).metrics
    assert {f"best_of@{SAMPLES}/prm", "weighted@2/prm", "best_of@1/logits"} <= found.keys()
    assert "weighted@2/logits" not in found and "weighted@k/logits of better: left out" in lines
    assert not [name for name in load_evaluation(run.test_time("plain")).metrics if "prm" in name]
    assert f"{run.scores('plain', 'prm') / 'sampled.parquet'}: left out: it scores other responses" in lines


@pytest.mark.parametrize(("overrides", "arm", "named"), [
    ([], "third", "no arm 'third'; it has warmup, plain, better"),
    (["evaluation.samples=3"], None, "4 responses .*evaluation.samples=3"),
    (["evaluation.vote_subsets=0"], None, "evaluation.vote_subsets is 0"),
])
def test_what_does_not_fit_is_an_error(run: RunFolder, overrides, arm, named: str):
    with pytest.raises(UserError, match=named):
        evaluate_stored([run.path], arm, overrides)
