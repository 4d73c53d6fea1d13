"""Makes the pretended machine: compiles its device and installs Transformer Engine's Python code, each once, in a cache
folder of the user."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from peer_environment import UNREACHABLE

MACHINE = Path(__file__).parent / "machine"
ROOT = Path(__file__).parents[2]
DEVICE = MACHINE / "device.cpp"
REQUIREMENTS = ROOT / "requirements" / "rehearsal" / "no-deps.txt"
NCCL = ROOT / "requirements" / "rehearsal" / "nccl.txt"
COMPILE = ("g++", "-O0", "-std=c++20", "-shared", "-fPIC")


class NotHere(Exception):
    """What this machine lacks for the rehearsal."""


def environment(*, transformer_engine: bool = True) -> dict[str, str]:
    """The variables with which Python finds a GPU. Raises NotHere, and RuntimeError where a compiler or pip fails."""
    path = [MACHINE, ROOT, ROOT / "tests", *([engine()] if transformer_engine else [])]
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
    if shutil.which("g++") is None:
        raise NotHere("no g++ to compile the pretended device with")
    key = _key(DEVICE.read_bytes(), version("torch").encode(), str(_torch()).encode(), " ".join(COMPILE).encode())
    return _cached(f"device-{key}", _compile) / "device.so"


def engine() -> Path:
    """A folder with Transformer Engine's Python code."""
    return _cached(f"transformer_engine-{_key(REQUIREMENTS.read_bytes())}", lambda made: _pip(made, REQUIREMENTS))


def nccl() -> Path:
    """NVIDIA's library, which answers a few calls without a GPU."""
    folder = _cached(f"nccl-{_key(NCCL.read_bytes())}", lambda made: _pip(made, NCCL))
    return folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"


def _torch() -> Path:
    return Path(find_spec("torch").origin).parent


def _compile(folder: Path) -> None:
    torch = _torch()
    flags = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib",
             f"-Wl,-rpath,{torch}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]  # fmt: skip
    _run([*COMPILE, DEVICE, "-o", folder / "device.so", *flags])


def _pip(folder: Path, requirements: Path) -> None:
    _run(["uv", "pip", "install", "--no-config", "--python", sys.executable, "--no-deps", "--target", folder, "-r", requirements])


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        if UNREACHABLE.search(said):
            raise NotHere(f"no package index for {command[-1]}")
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{said}")


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cache's folder ``name``, which is there once it is complete."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_edo" / "rehearsal"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / name).exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                (made := Path(folder) / name).mkdir()
                make(made)
                made.rename(cache / name)
    return cache / name


def _key(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
