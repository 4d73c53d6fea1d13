"""Processes with the pretended GPU, and without it, until this folder's last test: the groups of idle ones poll."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.tiny_models import write_tiny_model
from helpers.worker_pool import WorkerPool

from .prepare import NotHere, environment

CASES = "rehearsal.cases"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def gpu_environment() -> dict[str, str]:
    try:
        return environment()
    except NotHere as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def gpu(gpu_environment) -> Iterator[WorkerPool]:
    """A process with the pretended GPU and Transformer Engine."""
    with WorkerPool(1, environment=gpu_environment) as pool:
        yield pool


@pytest.fixture(scope="package")
def two_gpus(gpu_environment) -> Iterator[WorkerPool]:
    """Two processes, each with one."""
    with WorkerPool(2, environment=gpu_environment) as pool:
        yield pool


@pytest.fixture(scope="package")
def four_gpus(gpu_environment) -> Iterator[WorkerPool]:
    with WorkerPool(4, environment=gpu_environment) as pool:
        yield pool


@pytest.fixture(scope="package")
def cpu() -> Iterator[WorkerPool]:
    with WorkerPool(1, environment={}) as pool:
        yield pool


@pytest.fixture(scope="package")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "plain")
    write_tiny_model(folder / "other", seed=1)
    write_tiny_model(folder / "llama", "llama", tie_word_embeddings=True)
    write_tiny_model(folder / "experts", "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                     norm_topk_prob=True)
    write_tiny_model(folder / "wide", hidden_size=256, intermediate_size=256, head_dim=64)
    return folder


@pytest.fixture(scope="package")
def on_cpu(cpu) -> Callable[..., dict]:
    """What a case returns on the CPU, computed once for the same arguments."""
    known: dict[str, object] = {}

    def result(case: str, **arguments):
        key = repr((case, sorted(arguments.items(), key=str)))
        if key not in known:
            known[key] = cpu.run(f"{CASES}:{case}", **arguments)[0]
        return known[key]

    return result
