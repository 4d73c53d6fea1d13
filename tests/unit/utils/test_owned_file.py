"""One owner at a time, whether the file system has locks, refuses them, or accepts them without effect."""

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_edo.utils import owned_file
from nemo_edo.utils.owned_file import ALIVE_S, NO_LOCKS, InUse, OwnedFile


@pytest.fixture(params=["locks", "no effect", *NO_LOCKS])
def path(request, tmp_path: Path, monkeypatch) -> Path:
    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    if request.param != "locks":
        monkeypatch.setattr(owned_file.fcntl, "flock", (lambda *_: None) if request.param == "no effect" else refuse)
        monkeypatch.setattr(owned_file, "SETTLE_S", 0.05)
    return tmp_path / "lock"


def test_a_second_owner_is_refused_until_the_first_closes_the_file_or_has_ended(path: Path):
    first = OwnedFile(path)
    with pytest.raises(InUse, match=f"process {os.getpid()} on "):
        OwnedFile(path)
    first.close()
    if (child := os.fork()) == 0:
        OwnedFile(path)
        os._exit(0)
    os.waitpid(child, 0)
    OwnedFile(path).close()


def test_locks_that_hold_on_one_machine_alone_count_as_none_and_are_warned_of_once(tmp_path, monkeypatch, capsys):
    mounts = [SimpleNamespace(mountpoint=str(tmp_path.parent), opts="rw,localflock"),
              SimpleNamespace(mountpoint="/", opts="rw")]
    monkeypatch.setattr(owned_file.psutil, "disk_partitions", lambda **_: mounts)
    monkeypatch.setattr(owned_file, "SETTLE_S", 0.01)
    owned = [OwnedFile(tmp_path / name) for name in "ab"]
    assert capsys.readouterr().err.count("mounted with localflock") == 1
    for one in owned:
        one.close()


def test_without_locks_an_owner_on_another_machine_lives_as_long_as_it_touches_the_file(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(owned_file.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(owned_file, "SETTLE_S", 0.05)
    monkeypatch.setattr(owned_file, "BEAT_S", 0.05)
    path = tmp_path / "lock"
    path.write_text("process 5 on elsewhere\nboot/1 5 77\n")
    with pytest.raises(InUse, match="process 5 on elsewhere"):
        OwnedFile(path)
    os.utime(path, (0, time.time() - ALIVE_S - 1))
    owner = OwnedFile(path)
    os.utime(path, (0, 0))
    time.sleep(0.3)
    assert path.stat().st_mtime > time.time() - 10
    owner.close()


def test_another_error_of_the_lock_is_not_taken_for_a_missing_one(tmp_path: Path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "as told")

    monkeypatch.setattr(owned_file.fcntl, "flock", fail)
    with pytest.raises(OSError, match="as told"):
        OwnedFile(tmp_path / "lock")
