"""A reward model from the command line: trained on a run's stored responses, then scoring what its evaluations kept."""

import json
from pathlib import Path

import pytest
import yaml
from helpers.stored_run import LLAMA, write_stored_run

from nemo_edo.rollouts.store import ScoreStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory, nemo_edo) -> tuple[Path, Path]:
    """A run's folder, and the folder of a reward model that a command has trained on it."""
    root = tmp_path_factory.mktemp("reward")
    run = write_stored_run(root / "run")
    (root / "conf").mkdir()
    config = {"job": "reward_model", "name": "rm", "output_dir": str(root), "model": {"architecture": LLAMA},
              "data": {"run": str(run), "steps": "arithmetic", "max_tokens": 64, "validation_share": 0.25},
              "train": {"steps": 4, "batch_size": 4, "checkpoint_every": 2, "evaluate_every": 0}}
    (root / "conf" / "small.yaml").write_text(yaml.safe_dump(config))
    said = nemo_edo.succeed("train", "--config-path", str(root / "conf"), "--config-name", "small", "threads=1")
    assert "test, after training, pairs that share their prefix" in said
    return run, root / "rm"


def test_a_trained_reward_model_scores_the_runs_responses(trained, nemo_edo):
    run, model = trained
    results = json.loads((model / "results.json").read_text())
    assert results["ranking_accuracy"]["test"]["after"]["all"]["questions"] == 8
    nemo_edo.succeed("score", str(run), "--model", str(model / "model"), "--name", "small", "device=cpu")
    for policy in ("warmup", "grpo"):
        found = ScoreStore(run / "scores" / policy / "small").read("sampled")[0]
        assert len(found) == 40 and all(0 < score < 1 for one in found.values() for score in one.steps)


def test_the_config_of_another_job_is_refused_as_a_runs(trained, nemo_edo):
    done = nemo_edo("collect", "--config-path", str(trained[0].parent / "conf"), "--config-name", "small")
    assert done.returncode == 2 and "job: reward_model" in done.stderr
