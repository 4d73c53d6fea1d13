"""Bad input through a real process, as a user's shell and disk see it."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_too_small_for_the_rollouts_is_told_before_anything_is_written(tiny_disk: Path, nemo_edo):
    done = nemo_edo("train", "name=a", f"output_dir={tiny_disk}")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"nemo-edo: error: {tiny_disk / 'a'}: needs ") and "output_dir" in line
    assert list(tiny_disk.iterdir()) == []
