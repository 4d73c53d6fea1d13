"""Environments of other libraries that the losses are compared with, each built once and kept in the repository."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What pip says of an index that it cannot reach, before it gives up with "Could not find a version".
UNREACHABLE = re.compile(r"connection broken by|connection error:|Max retries exceeded|Failed to establish a new conn")


def _peer_environment(name: str) -> Path:
    """The interpreter of ROOT/.venv-NAME: what requirements/peers/NAME.txt pins, and beside it the environment of
    this test run. The stamp is written last, so that an install that was broken off is begun anew."""
    requirements, folder = ROOT / "requirements" / "peers" / f"{name}.txt", ROOT / f".venv-{name}"
    beside = sysconfig.get_path("purelib")
    key = hashlib.sha256(requirements.read_bytes() + beside.encode()).hexdigest()[:16]
    python, stamp = folder / "bin" / "python", folder / f".installed-{key}"
    if stamp.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"]
    installed = subprocess.run([*pip, "--no-deps", "-r", requirements], capture_output=True, text=True)
    if installed.returncode:
        if UNREACHABLE.search(installed.stdout + installed.stderr):
            pytest.skip(f"no package index to install {name} from")
        pytest.fail(f"pip could not install {requirements}:\n{installed.stdout}{installed.stderr}")
    [site_packages] = folder.glob("lib/python*/site-packages")
    (site_packages / "beside.pth").write_text(beside)
    stamp.touch()
    return python


@pytest.fixture(scope="session")
def run_in_trl() -> Callable[..., None]:
    """Runs a script of this folder, with arguments, in the environment that has TRL."""
    python = _peer_environment("trl")

    def run(script: str, *arguments: Path) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
        command = [python, Path(__file__).parent / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet}, timeout=300)
        assert done.returncode == 0, done.stderr

    return run
