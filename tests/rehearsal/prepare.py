"""Makes the pretended machine: compiles its device, once, in a cache folder of the user, and installs Transformer
Engine's Python code in a separate environment of the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from peer_environment import ROOT, NoPackageIndex, peer_environment

MACHINE = Path(__file__).parent / "machine"
DEVICE = MACHINE / "device.cpp"
COMPILE = ("g++", "-O0", "-std=c++20", "-shared", "-fPIC")


class NotHere(Exception):
    """What this machine lacks for the rehearsal."""


def environment() -> dict[str, str]:
    """The variables with which Python finds a GPU, Transformer Engine and apex. Raises NotHere, and RuntimeError where
    a compiler or uv fails."""
    path = [MACHINE, ROOT, ROOT / "tests", MACHINE / "extensions", transformer_engine_folder()]
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
    try:
        python = peer_environment("rehearsal")
    except NoPackageIndex as error:
        raise NotHere(str(error)) from error
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    return packages


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise NotHere(f"no {program} to make the pretended machine with")


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
