"""One stored run, and one folder of each kind of reward model. Tests that write take copies."""

from pathlib import Path

import pytest
from helpers.reward_models import write_own_reward_model, write_qwen_prm, write_skywork_prm
from helpers.stored_run import write_stored_run


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    return write_stored_run(tmp_path_factory.mktemp("stored") / "run")


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"qwen": write_qwen_prm(root / "qwen"), "skywork": write_skywork_prm(root / "skywork"),
            "decoder": write_own_reward_model(root / "decoder"),
            "encoder": write_own_reward_model(root / "encoder", "modernbert")}
