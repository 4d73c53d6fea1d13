"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_edo.files import replacing


@pytest.mark.parametrize("earlier", [None, b"old"])
def test_the_path_holds_what_it_held_until_the_block_ends(tmp_path: Path, earlier: bytes | None):
    path = tmp_path / "file"
    if earlier is not None:
        path.write_bytes(earlier)
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == earlier
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_block_leaves_everything_as_it_was(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half of the n")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("synced") or fsync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda *paths: events.append("replaced") or replace(*paths))
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert events == ["synced", "replaced"]


def test_a_killed_writer_leaves_the_old_content_and_the_next_one_succeeds(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = f"""
import os, signal
from pathlib import Path
from nemo_edo.files import replacing
with replacing(Path({str(path)!r})) as file:
    file.write(b"half of the n")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
