"""Training a reward model by ranking NCE: its results, and the effect of a kill, the seed and micro-batches."""

import json
import math
from pathlib import Path

import pytest
from helpers.stored_run import reward_config as config

from nemo_edo.reward_models import train as module
from nemo_edo.reward_models.process_reward import ProcessRewardModel
from nemo_edo.reward_models.train import train_reward_model
from nemo_edo.test_time.search_llm import StepPath


def weights(folder: Path) -> bytes:
    return (folder / "rm" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    train_reward_model(config(run, out))
    return out


def test_the_trained_folder_scores_steps_and_has_its_results(trained, run):
    results = json.loads((trained / "rm" / "results.json").read_text())
    for part in ("validation", "test"):
        for moment in ("before", "after"):
            one = results["ranking_accuracy"][part][moment]["all"]
            assert 0 <= one["low"] <= one["mean"] <= one["high"] <= 1 and one["pairs"] > 10
    losses = [line["loss"] for line in results["history"] if "loss" in line]
    assert len(losses) == 6 and losses[0] == pytest.approx(math.log(4), abs=0.3)
    model = ProcessRewardModel(trained / "rm" / "model", device="cpu")
    assert model.format.separator == "\n"
    [scores] = model.score_encoded([model.format.encode(StepPath("1 + 2", ("1 + 2 = 3", "#### 3")))])
    assert len(scores) == 2 and not (trained / "rm" / "checkpoints").exists()


def test_a_killed_training_resumes_to_the_same_weights(trained, run, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    loss, steps = module.NCETrainer.compute_loss, []

    def dies(self, *arguments, **named):
        steps.append(1)
        if len(steps) == 6:
            raise Killed
        return loss(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module.NCETrainer, "compute_loss", dies)
        with pytest.raises(Killed):
            train_reward_model(config(run, tmp_path))
    checkpoints = tmp_path / "rm" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    (checkpoints / "checkpoint-5").mkdir()  # as one that was being written
    assert not (tmp_path / "rm" / "model").exists()
    train_reward_model(config(run, tmp_path))
    assert weights(tmp_path) == weights(trained)


def test_micro_batches_change_the_weights_by_rounding_only(trained, run, tmp_path):
    from safetensors.torch import load

    train_reward_model(config(run, tmp_path, micro_batch_size=2))
    one, other = load(weights(trained)), load(weights(tmp_path))
    initial = one["score.weight"] - other["score.weight"]
    assert initial.abs().max() < 2e-4  # Adam's steps are of the size of the learning rate, 1e-3
