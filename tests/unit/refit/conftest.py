"""Scripted servers, and tiny models to bring to them. Helpers are no package, hence not imported."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

HELPERS = Path(__file__).parents[2] / "helpers"


def helper(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(HELPERS / name)))


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    return helper("tiny_models.py")


@pytest.fixture(scope="session")
def tiny_qwen2(tiny, tmp_path_factory) -> Path:
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def scripted_servers() -> SimpleNamespace:
    return helper("scripted_server.py")


@pytest.fixture
def scripted_replica(scripted_servers) -> type:
    return scripted_servers.ScriptedReplica


@pytest.fixture
def engine_of(scripted_servers):
    return scripted_servers.engine_of
