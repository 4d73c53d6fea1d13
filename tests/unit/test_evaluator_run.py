"""Evaluation of run folders from what is stored in them."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_edo.config import EvaluationConfig, RunConfig
from nemo_edo.configuration import compose_run, resolved_yaml
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.data.score_store import ScoreStore, StepScores, rollouts_checksum
from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.evaluation.run_record import load_evaluation
from nemo_edo.evaluator_run import evaluate_stored
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import Rollout, ScoredRollout

PROBLEMS, SAMPLES, ITERATIONS = 9, 4, 2
ARMS = {"plain": 0.4, "better": 0.8}


def responses(arm: str, samples: int, seed: int) -> list[ScoredRollout]:
    rng, found = random.Random(f"{arm} {seed}"), []
    for problem in range(PROBLEMS):
        for sample in range(samples):
            right = rng.random() < ARMS.get(arm, 0.2)
            ids = tuple(rng.choices(range(9), k=rng.randint(4, 8)))
            rollout = Rollout(f"test-{problem}", sample, (1,), ids, (-0.5,) * len(ids), "text", True, 2, 7)
            found.append(ScoredRollout(rollout, float(right), "1" if right else rng.choice("23"), True, "correct"))
    return found


def store(folder: RunFolder, arm: str, iteration: int, seed: int = 0) -> list[ScoredRollout]:
    """As an evaluation of the arm leaves it."""
    sampled = responses(arm, SAMPLES, seed)
    for kind, scored in (("greedy", responses(arm, 1, seed)), ("sampled", sampled)):
        RolloutStore(folder.evaluated(arm, kind)).write(iteration, scored, rank=0, world_size=1)
    folder.write_evaluation(Evaluation(arm, ("test-0",), {"accuracy": (np.ones(1), np.ones(1))}))
    return sampled


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
        store(run, arm, ITERATIONS if arm in ARMS else 0, seed)
    return run


@pytest.fixture
def run(tmp_path: Path, config) -> RunFolder:
    return write_run(tmp_path / "first", config)


def write_scores(run: RunFolder, arm: str, name: str, low: float = 0.0) -> None:
    sampled = RolloutStore(run.evaluated(arm, "sampled")).read(ITERATIONS)
    rng = random.Random(0)
    scores = {(s.rollout.problem_id, s.rollout.sample_index): StepScores((9.0, low + rng.random())) for s in sampled}
    ScoreStore(run.scores(arm, name)).write("sampled", scores, rollouts=rollouts_checksum(sampled), made_by="prm")


def test_every_evaluated_arm_gets_its_file_and_is_compared(run: RunFolder):
    lines = evaluate_stored([run.path], None, [])
    for arm in ("warmup", *ARMS):
        evaluation = load_evaluation(run.test_time(arm))
        rewards = [one.reward for one in responses(arm, SAMPLES, 0)]
        sums, counts = evaluation.metrics["accuracy"]
        assert (evaluation.arm, sums.sum(), counts.sum()) == (arm, sum(rewards), len(rewards))
        assert f"written: {run.test_time(arm)}" in lines
    assert any(line.startswith("differences from warmup") for line in lines)


def test_the_runs_own_baseline_is_what_arms_are_compared_with(run: RunFolder):
    run.write_json("summary.json", {"baseline": "plain"})
    lines = "\n".join(evaluate_stored([run.path], None, []))
    assert "differences from plain" in lines and "  better  " in lines


def test_one_arm_alone_is_compared_with_nothing(run: RunFolder):
    lines = evaluate_stored([run.path], "better", [])
    assert [line for line in lines if line.startswith("written")] == [f"written: {run.test_time('better')}"]
    assert not any("differences" in line for line in lines) and not run.test_time("plain").exists()


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
    store(run, "plain", ITERATIONS, seed=5)  # evaluated again since
    lines = "\n".join(evaluate_stored([run.path], None, []))
    found = load_evaluation(run.test_time("better")).metrics
    assert {f"best_of@{SAMPLES}/prm", "weighted@2/prm", "best_of@1/logits"} <= found.keys()
    assert "weighted@2/logits" not in found and "weighted@k/logits of better: left out" in lines
    assert not [name for name in load_evaluation(run.test_time("plain")).metrics if "prm" in name]
    assert f"{run.scores('plain', 'prm') / 'sampled.parquet'}: left out, for it scores other responses" in lines


def test_the_aggregation_of_steps_is_the_settings(run: RunFolder):
    write_scores(run, "better", "prm")
    curves = {}
    for how in ("last", "mean", "product"):
        if how == "product":
            with pytest.raises(UserError, match="evaluation.aggregation is product, which the scores prm do not fit"):
                evaluate_stored([run.path], "better", [f"evaluation.aggregation={how}"])
            continue
        evaluate_stored([run.path], "better", [f"evaluation.aggregation={how}"])
        curves[how] = load_evaluation(run.test_time("better")).metrics[f"weighted@{SAMPLES}/prm"][0].tolist()
    assert len(curves) == 2


@pytest.mark.parametrize(("overrides", "arm", "message"), [
    (["seed=3"], None, "takes overrides of evaluation.\\* only, not seed=3"),
    ([], "third", "has no arm 'third'; it has warmup, plain, better"),
    (["evaluation.samples=3"], None, "4 responses to each problem are stored, which evaluation.samples=3 does not"),
    (["evaluation.aggregation=sum"], None, "evaluation.aggregation is 'sum', expected one of last, min, product, mean"),
    (["evaluation.vote_subsets=0"], None, "evaluation.vote_subsets is 0, expected a number above 0"),
])  # fmt: skip
def test_what_does_not_fit_is_an_error(run: RunFolder, overrides, arm, message: str):
    with pytest.raises(UserError, match=message):
        evaluate_stored([run.path], arm, overrides)


def test_an_unfinished_run_has_the_arms_that_were_evaluated(tmp_path: Path, config):
    run = write_run(tmp_path / "run", config, arms=("warmup",))
    assert any(line.startswith("warmup: 9 problems") for line in evaluate_stored([run.path], None, []))
    with pytest.raises(UserError, match="arm plain has not been evaluated yet"):
        evaluate_stored([run.path], "plain", [])
    empty = write_run(tmp_path / "empty", config, arms=())
    with pytest.raises(UserError, match="no arm has been evaluated yet"):
        evaluate_stored([empty.path], None, [])


def test_neither_megatron_nor_a_process_group_is_there(run: RunFolder):
    code = (
        "import sys; from nemo_edo.cli import main; assert main(sys.argv[1:]) == 0\n"
        "import torch; assert not torch.distributed.is_initialized()\n"
        "assert not {'megatron', 'nemo', 'lightning', 'vllm', 'transformers', 'httpx'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "evaluate", str(run.path), "--stored"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "pass@k" in done.stdout, done.stderr
