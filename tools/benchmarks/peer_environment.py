"""Separate environments for other libraries that we compare with, each built once and kept in the repository."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What pip says about an index that it cannot reach, before it gives up with "Could not find a version".
UNREACHABLE = re.compile(r"connection broken by|connection error:|Max retries exceeded|Failed to establish a new conn")


class NoPackageIndex(Exception):
    """There is no package index to install from."""


def peer_environment(name: str) -> Path:
    """The interpreter of ROOT/.venv-NAME: what requirements/peers/NAME.txt pins, in addition to the environment that
    this runs in. The stamp is written last, so that an interrupted install starts over.

    Raises NoPackageIndex, and RuntimeError where pip fails for any other reason.
    """
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
        said = installed.stdout + installed.stderr
        if UNREACHABLE.search(said):
            raise NoPackageIndex(f"no package index to install {name} from")
        raise RuntimeError(f"pip could not install {requirements}:\n{said}")
    [site_packages] = folder.glob("lib/python*/site-packages")
    (site_packages / "beside.pth").write_text(beside)
    stamp.touch()
    return python
