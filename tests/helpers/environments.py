"""Environments that stand for the one with vLLM."""

import subprocess
import sys
from pathlib import Path

from helpers import nccl_stub


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
