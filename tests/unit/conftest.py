"""What unit tests of several folders stand on."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def slow_writer(monkeypatch):
    """Megatron's writer of files, after a while."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    def wait_and_write(*args, **kwargs):
        time.sleep(1.5)
        write(*args, **kwargs)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(wait_and_write))
