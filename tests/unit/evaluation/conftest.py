import runpy
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[2] / "helpers" / "run_folder.py"


@pytest.fixture(scope="session")
def write_run_folder():
    """The writer of a synthetic run folder; tests are no package, hence not imported."""
    return runpy.run_path(str(HELPER))["write_run_folder"]
