"""Runs scripts in the environments of other libraries that the losses are compared with."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from peer_environment import NoPackageIndex, peer_environment


@pytest.fixture(scope="session")
def run_in_trl() -> Callable[..., None]:
    """Runs a script of this folder, with arguments, in the environment that has TRL."""
    try:
        python = peer_environment("trl")
    except NoPackageIndex as error:
        pytest.skip(str(error))

    def run(script: str, *arguments: Path) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
        command = [python, Path(__file__).parent / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet}, timeout=300)
        assert done.returncode == 0, done.stderr

    return run
