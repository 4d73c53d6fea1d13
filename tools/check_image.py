"""Checks the GPU image at the end of its build (Dockerfile), and fails with a line for each fault.

    python check_image.py LOCKED.txt

Most of these faults would otherwise show only in a job, or never: without Transformer Engine, training uses other
kernels. No check needs a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

COMPILED = ("torch", "triton", "numpy")
"""Packages whose versions are the image's and not the lock's."""
IMPORTED = ("transformer_engine.pytorch", "apex", "flash_attn", "megatron.core", "megatron.bridge", "nemo_edo")
VLLM = "/opt/vllm/bin/python"


def unlocked(packages: list[Requirement]) -> Iterator[str]:
    """Packages that Python finds at another version than the lock's, such as the image's."""
    for package in packages:
        try:
            found = version(package.name)
        except PackageNotFoundError:
            found = "missing"
        if found == "missing" or not package.specifier.contains(found, prereleases=True):
            yield f"{package.name} is {found}, the lock has {package.specifier}"


def too_old(packages: list[Requirement]) -> Iterator[str]:
    """Compiled packages of the image at versions that a locked package does not accept."""
    # From the modules: the version in the metadata of NVIDIA's builds has another suffix, where there is metadata.
    found = {name: str(import_module(name).__version__) for name in COMPILED}
    for package in packages:
        for needed in map(Requirement, requires(package.name) or ()):
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if applies and needed.name in found and not needed.specifier.contains(found[needed.name], prereleases=True):
                yield f"{package.name} needs {needed}, the image has {found[needed.name]}"


def two_nccls() -> Iterator[str]:
    """NCCL's version of the trainer's PyTorch, of vLLM's, and in the file of a refit, where they differ."""
    import torch

    from nemo_edo.refit.libnccl import Library
    from nemo_edo.utils.processes import package_file

    code = "import torch, vllm; print(*torch.cuda.nccl.version()[:3], sep='.')"
    said = subprocess.run([VLLM, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {
        "the trainer's PyTorch": ".".join(map(str, torch.cuda.nccl.version()[:3])),
        "vLLM's PyTorch": said.split()[-1],
        "a refit": Library(package_file(VLLM, "nvidia.nccl", "lib/libnccl.so.2")).version,
    }
    if len(set(found.values())) > 1:
        yield f"more than one NCCL: {found}"


def main() -> None:
    packages = [Requirement(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    for module in IMPORTED:
        import_module(module)
    import numpy
    import torch
    from megatron.core.extensions.transformer_engine import HAVE_TE

    torch.from_numpy(numpy.ones(2))  # fails if PyTorch was compiled for another major version of numpy
    faults = [*unlocked(packages), *too_old(packages), *two_nccls()]
    if not HAVE_TE:
        faults.append("megatron-core does not find Transformer Engine")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
