import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture(scope="session")
def helpers_folder() -> Path:
    return HELPERS


@pytest.fixture(scope="session")
def tiny():
    """tests/helpers/tiny_models.py; tests are no package, hence not imported."""
    return SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_models.py")))


@pytest.fixture(scope="session")
def tiny_qwen2(tiny, tmp_path_factory) -> Path:
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"))
