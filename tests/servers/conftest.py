"""Helpers that start real servers run as processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="session")
def found_by(vllm_environment: Path, tmp_path_factory):
    """found_by(name, *arguments): what tests/helpers/NAME.py has found, in a new folder."""

    def run(name: str, *arguments: object) -> dict:
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, str(HELPERS / f"{name}.py"), str(folder), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((folder / "results.json").read_text())

    return run
