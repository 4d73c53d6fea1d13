import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

HELPER = Path(__file__).parents[2] / "helpers" / "tiny_models.py"


@pytest.fixture(scope="session")
def tiny():
    """tests/helpers/tiny_models.py; tests are no package, hence not imported."""
    return SimpleNamespace(**runpy.run_path(str(HELPER)))


@pytest.fixture(scope="session")
def tiny_qwen2(tiny, tmp_path_factory) -> Path:
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"))
