"""One owner at a time, where the file system has locks."""

import errno
import os
from pathlib import Path

import pytest

from nemo_edo.utils import owned_file
from nemo_edo.utils.owned_file import NO_LOCKS, InUse, OwnedFile


def test_a_second_owner_is_refused_until_the_first_closes_the_file_or_has_ended(tmp_path: Path):
    first = OwnedFile(tmp_path / "lock")
    with pytest.raises(InUse, match=f"process {os.getpid()} on "):
        OwnedFile(tmp_path / "lock")
    first.close()
    if (child := os.fork()) == 0:
        OwnedFile(tmp_path / "lock")
        os._exit(0)
    os.waitpid(child, 0)
    OwnedFile(tmp_path / "lock").close()


@pytest.mark.parametrize("number", [*NO_LOCKS, errno.EIO])
def test_a_file_system_without_locks_is_warned_of_and_another_error_is_raised(tmp_path, monkeypatch, capsys, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owned_file.fcntl, "flock", fail)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            OwnedFile(tmp_path / "lock")
        return
    OwnedFile(tmp_path / "lock").close()
    assert f"{tmp_path / 'lock'}: locks do not work" in capsys.readouterr().err
