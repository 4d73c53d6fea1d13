"""Bad input through a real process, as a user's shell and disk see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEMO_EDO = "import sys; from nemo_edo.cli import main; sys.exit(main())"  # what the console script runs


def nemo_edo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", NEMO_EDO, *arguments], env=environment, capture_output=True, text=True,
                          timeout=200)


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


def test_a_bad_row_is_the_only_thing_on_stderr_and_nothing_is_left_behind(tmp_path: Path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1", "answer": "#### 2"}\n{"question": "1 + 2", "answer": "three"}\n')
    done = nemo_edo("train", "name=a", f"output_dir={tmp_path / 'runs'}", f"data.train={problems}",
                    f"data.test={problems}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"nemo-edo: error: {problems}: bad rows: 1 of 2; correct them, or leave them out with --on-bad-rows=skip\n"
        f'  {problems}:2: "answer" does not end in one "#### number" line, as in "... #### 72"\n'
    )
    assert list(tmp_path.iterdir()) == [problems]


def test_a_disk_too_small_for_the_rollouts_is_told_before_anything_is_written(tiny_disk: Path):
    done = nemo_edo("train", "name=a", f"output_dir={tiny_disk}")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"nemo-edo: error: {tiny_disk / 'a'}: needs ")
    assert "set output_dir to another file system" in line
    assert list(tiny_disk.iterdir()) == []
