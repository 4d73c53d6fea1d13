"""Separate environments, for other libraries that we compare with and for servers: each is a locked project of uv."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = ROOT / "tools" / "uv"
# What uv says about an index that it cannot reach.
UNREACHABLE = re.compile(r"Could not connect|are you offline|Failed to fetch|error sending request|dns error")


class NoPackageIndex(Exception):
    """There is no package index to install from."""


def peer_environment(name: str) -> Path:
    """The interpreter of ROOT/.venv-NAME, which has what requirements/NAME locks. Another process that builds it is
    waited for.

    Raises NoPackageIndex, and RuntimeError where uv fails for any other reason.
    """
    project, folder = ROOT / "requirements" / name, ROOT / f".venv-{name}"
    with (project / "uv.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_uv("sync", "--locked", "--project", project, UV_PROJECT_ENVIRONMENT=str(folder))
    return folder / "bin" / "python"


def run_uv(*arguments: str | Path, **variables: str) -> str:
    """What uv prints. Raises as ``peer_environment`` does."""
    without = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, env={**without, **variables})
    if done.returncode:
        said = done.stdout + done.stderr
        command = " ".join(map(str, arguments))
        if UNREACHABLE.search(said):
            raise NoPackageIndex(f"no package index for uv {command}")
        raise RuntimeError(f"uv {command} failed:\n{said}")
    return done.stdout
