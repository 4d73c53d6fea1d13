"""Runs scripts in the environments of other libraries that the losses are compared with."""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from peer_environment import NoPackageIndex, peer_environment

ROOT, SCRIPTS = Path(__file__).parents[2], Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def run_in_peer() -> Callable[..., None]:
    """run("trl", script, *arguments): a script of scripts/ in the environment of requirements/trl, with
    this checkout; ``launcher`` comes between the interpreter and the script, ``path`` is searched for packages too."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

    def run(peer: str, script: str, *arguments: str | Path, launcher: Sequence[str] = (), path: Path = SCRIPTS) -> None:
        try:
            python = peer_environment(peer)
        except NoPackageIndex as error:
            pytest.skip(str(error))
        command = [python, *launcher, SCRIPTS / script, *arguments]
        environment = {**os.environ, **quiet, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, done.stderr

    return run
