"""What a machine has: Python, packages, GPUs, memory, disk. Nothing heavy is imported for it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from nemo_edo.doctor.parts import BRIDGE, TRAINER, installed
from nemo_edo.errors import UserError

WITHOUT_DEPENDENCIES = "megatron-bridge"
"""Its declared dependencies need a GPU machine's compilers."""
ON_GPUS = {"transformer-engine": "fused kernels, FP8, context parallelism"}
"""Packages that Megatron uses on GPUs where they are installed, and what for."""
ABOUT = ("torch", "megatron-core", WITHOUT_DEPENDENCIES, "nemo-toolkit", "transformers")


@dataclass(frozen=True)
class Package:
    """name: as pip knows it. found: the installed version; None where it is absent."""

    name: str
    needed: str
    found: str | None
    satisfies: bool

    @property
    def remedy(self) -> str:
        """A command that installs what is needed."""
        options = " --no-deps" if self.name == WITHOUT_DEPENDENCIES else ""
        return f"pip install{options} '{self.name}{self.needed}'"


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes: int
    capability: str


def python_version() -> str:
    return platform.python_version()


def needed_packages(distribution: str = "nemo-edo") -> list[Package]:
    """What the trainer is declared to need, Megatron-Bridge included, and what is installed of it.

    Raises UserError where ``distribution`` itself is not installed.
    """
    try:
        declared = [Requirement(line) for line in requires(distribution) or []]
    except PackageNotFoundError as error:
        raise UserError(f"{distribution} is not installed in this environment: pip install --no-deps .") from error
    return [_package(need) for need in declared if _is_wanted(need)]


def _is_wanted(need: Requirement) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (TRAINER, BRIDGE))


def _package(need: Requirement) -> Package:
    found = installed(need.name)
    satisfies = found is not None and need.specifier.contains(found, prereleases=True)
    return Package(need.name, str(need.specifier), found, satisfies)


def gpus() -> list[Gpu]:
    """Those that the driver's ``nvidia-smi`` lists and CUDA_VISIBLE_DEVICES leaves to this process; none where there is
    no driver. Raises UserError where it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listed, names = parse_gpus(_query(tool, "name,memory.total,compute_cap")), os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None or "MIG-" in names:  # instances of a partitioned GPU are not listed
        return listed
    return visible(listed, _query(tool, "uuid").split() if "GPU-" in names else [], names)


def _query(tool: str, fields: str) -> str:
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise UserError(f"nvidia-smi fails: {(result.stderr or result.stdout).strip()}; repair the GPU's driver")
    return result.stdout


def visible(listed: Sequence[Gpu], uuids: Sequence[str], names: str) -> list[Gpu]:
    """The GPUs of a CUDA_VISIBLE_DEVICES as CUDA reads it: indices or beginnings of UUIDs, until one is no GPU's.
    uuids: of ``listed``, where a name may be one."""
    found = []
    for name in map(str.strip, names.split(",")):
        named = [place for place, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        named += [place for place in range(len(listed)) if name == str(place)]
        if len(named) != 1:
            break
        found.append(listed[named[0]])
    return found


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs in ``nvidia-smi``'s lines NAME, MIB, CAPABILITY."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    return [Gpu(name, int(mebibytes) * 2**20, capability) for name, mebibytes, capability in rows]
