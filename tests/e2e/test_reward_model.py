"""A reward model from the command line: trained on a run's stored responses, then scoring what its evaluations kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_edo.data.score_store import ScoreStore
from tests.helpers.stored_run import LLAMA, write_stored_run


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "nemo_edo", *arguments], capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A run's folder, and the folder of a reward model that a command has trained on it."""
    root = tmp_path_factory.mktemp("reward")
    run = write_stored_run(root / "run")
    (root / "conf").mkdir()
    config = {"job": "reward_model", "name": "rm", "output_dir": str(root), "model": {"architecture": LLAMA},
              "data": {"run": str(run), "steps": "arithmetic", "max_tokens": 64, "validation_share": 0.25},
              "train": {"steps": 4, "batch_size": 4, "checkpoint_every": 2, "evaluate_every": 0}}
    (root / "conf" / "small.yaml").write_text(yaml.safe_dump(config))
    done = command("train", "--config-path", str(root / "conf"), "--config-name", "small", "threads=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test, after training, pairs that share their prefix" in done.stdout
    return run, root / "rm"


def test_a_trained_reward_model_scores_the_runs_responses(trained):
    run, model = trained
    results = json.loads((model / "results.json").read_text())
    assert results["ranking_accuracy"]["test"]["after"]["all"]["questions"] == 8
    done = command("score", str(run), "--model", str(model / "model"), "--name", "small", "device=cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for policy in ("warmup", "grpo"):
        found = ScoreStore(run / "scores" / policy / "small").read("sampled")
        assert len(found) == 40 and all(0 < score < 1 for one in found.values() for score in one.steps)


@pytest.mark.parametrize(("overrides", "message"), [
    (["train.stepz=3"], "unknown key train.stepz (command line: train.stepz=3); the nearest known key is train.steps"),
    (["train.steps=x"], "train.steps is 'x', expected an integer (command line: train.steps=x)"),
    (["train.weighting=uniform"], "train.l2 is 0.0, expected a number above 0 with train.weighting uniform"),
    (["data.steps=right"], "data.steps is 'right', expected one of answer, arithmetic (command line"),
    (["model.path=x"], "model.path and model.architecture: give one of them"),
    (["data.run=nowhere"], "nowhere is not the folder of a run"),
])  # fmt: skip
def test_a_wrong_setting_is_one_line_with_its_place(trained, overrides: list[str], message: str):
    conf = trained[0].parent / "conf"
    done = command("train", "--config-path", str(conf), "--config-name", "small", "name=other", *overrides)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_the_config_of_another_job_is_no_runs(trained):
    done = command("collect", "--config-path", str(trained[0].parent / "conf"), "--config-name", "small")
    assert done.returncode == 2
    assert "small is the config of another job (job: reward_model), not of a run" in done.stderr
