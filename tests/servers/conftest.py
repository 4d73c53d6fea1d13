"""Helpers that start real servers run as processes of their own."""

import json
from pathlib import Path

import pytest
from helpers.cli import Cli, script

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="session")
def found_by(vllm_environment: Path, tmp_path_factory):
    """found_by(name, *arguments): what tests/helpers/NAME.py has found, in a new folder."""

    def run(name: str, *arguments: object) -> dict:
        folder = tmp_path_factory.mktemp(name)
        Cli(script).succeed(str(HELPERS / f"{name}.py"), str(folder), *map(str, arguments), limit_s=3000.0)
        return json.loads((folder / "results.json").read_text())

    return run
