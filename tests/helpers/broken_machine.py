"""Parts of a machine that are broken on purpose, for ``nemo-edo selftest``."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from helpers import nccl_stub

_CLONE_NEWNS, _READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


def make_read_only(folder: str) -> None:
    """For this process and its children: ``Cli``'s ``before``."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.fsencode(folder)
    mounts = [(b"/", _RECURSIVE | _PRIVATE), (path, _BIND), (path, _REMOUNT | _BIND | _READ_ONLY)]
    if libc.unshare(_CLONE_NEWNS) or any([libc.mount(place, place, None, flags, None) for place, flags in mounts]):
        raise OSError(ctypes.get_errno(), "unshare or mount")


def environment(folder: Path, *, nccl: int | None = None, server: str | None = None) -> Path:
    """The interpreter of a new environment. nccl: with a stub that has this version. server: with a vLLM whose server
    has this source."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    if nccl is not None:
        library = packages / "nvidia" / "nccl" / "lib"
        library.mkdir(parents=True)
        nccl_stub.build(library, nccl)
    if server is not None:
        module = packages / "vllm" / "entrypoints" / "openai"
        module.mkdir(parents=True)
        (packages / "vllm" / "__init__.py").touch()
        (module / "api_server.py").write_text(server)
    return folder / "bin" / "python"
