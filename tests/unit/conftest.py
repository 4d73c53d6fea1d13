"""Fixtures that unit tests of several folders share."""

import time
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny():
    """helpers.tiny_models, imported only for tests that need models."""
    from helpers import tiny_models

    return tiny_models


@pytest.fixture(scope="session")
def tiny_qwen2(tiny, tmp_path_factory) -> Path:
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def policy(tiny, tiny_qwen2):
    return tiny.build_policy(tiny_qwen2)


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, as a run has one."""
    import torch

    alone = not torch.distributed.is_initialized()
    if alone:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if alone:
        torch.distributed.destroy_process_group()


@pytest.fixture
def held_writer(monkeypatch, tmp_path):
    """Megatron's writer of files, which waits until what this returns is called with the name of a folder that it
    writes in."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write, gates = FileSystemWriterAsync.write_preloaded_data, tmp_path.parent / f"{tmp_path.name}_gates"
    gates.mkdir()

    def wait_and_write(*args, write_bucket, **kwargs):
        while not (gates / Path(write_bucket[0]).parent.name).exists():
            time.sleep(0.01)
        return write(*args, write_bucket=write_bucket, **kwargs)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(wait_and_write))
    return lambda folder: (gates / folder).touch()
