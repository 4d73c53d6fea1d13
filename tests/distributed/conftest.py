"""Pools of processes for the whole session: see helpers.worker_pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny_models import write_tiny_model
from helpers.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def two() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four() -> Iterator[WorkerPool]:
    with WorkerPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def one() -> Iterator[WorkerPool]:
    """What two processes are compared with, in a process whose torch is adapted as theirs is."""
    with WorkerPool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model of two layers, without shared embeddings."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))
