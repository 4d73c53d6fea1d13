"""Makes the pretended machine: compiles its device, once, in a cache folder of the user, and installs Transformer
Engine's Python code in a separate environment of the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

MACHINE = Path(__file__).parent / "machine"
ROOT = Path(__file__).parents[2]
DEVICE = MACHINE / "device.cpp"
ENGINE = ROOT / "requirements" / "rehearsal"
COMPILE = ("g++", "-O0", "-std=c++20", "-shared", "-fPIC")
# What uv says without a network.
UNREACHABLE = re.compile(r"Failed to (fetch|download)|connectivity is disabled")


class NotHere(Exception):
    """What this machine lacks for the rehearsal."""


def environment(*, transformer_engine: bool = True) -> dict[str, str]:
    """The variables with which Python finds a GPU. transformer_engine: and Transformer Engine and apex. Raises NotHere,
    and RuntimeError where a compiler or uv fails."""
    engine = [MACHINE / "extensions", transformer_engine_folder()] if transformer_engine else []
    path = [MACHINE, ROOT, ROOT / "tests", *engine]
    return {
        "PRETENDED_CUDA": str(device()),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "NVTE_TORCH_COMPILE": "0",
        "NVTE_PROJECT_BUILDING": "1",  # it looks for no libraries of CUDA
        "OMP_NUM_THREADS": "1",
    }


def device() -> Path:
    """The compiled device, which finds torch's libraries in the folder that it was compiled for: ten seconds."""
    _require("g++")
    torch = Path(find_spec("torch").origin).parent
    # torch's own libraries for CUDA are needed, too, so that they register before the device does.
    flags = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib",
             f"-Wl,-rpath,{torch}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]  # fmt: skip
    parts = [DEVICE.read_text(), version("torch"), *COMPILE, *flags]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_edo" / "rehearsal"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"device-{key}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = Path(folder) / "device.so"
                _run([*COMPILE, DEVICE, "-o", made, *flags])
                made.rename(library)
    return library


def transformer_engine_folder() -> Path:
    """The folder of packages with Transformer Engine's Python code, which has no compiled part."""
    _require("uv")
    folder = ROOT / ".venv-rehearsal"
    _run(["uv", "sync", "--locked", "--project", ENGINE, "--python", sys.executable],
         environment={"UV_PROJECT_ENVIRONMENT": str(folder)})  # fmt: skip
    [packages] = folder.glob("lib/python*/site-packages")
    return packages


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise NotHere(f"no {program} to make the pretended machine with")


def _run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        if UNREACHABLE.search(done.stderr):
            raise NotHere("no package index for Transformer Engine")
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
