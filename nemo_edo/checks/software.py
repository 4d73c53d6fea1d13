"""Checks of what is installed: packages, the driver, Transformer Engine and its companions, NCCL, servers."""

from __future__ import annotations

from packaging.requirements import Requirement

from nemo_edo.checks import installed
from nemo_edo.checks.findings import Finding, failed, impossible, passed
from nemo_edo.checks.machine import Machine
from nemo_edo.utils import host_memory


def versions(machine: Machine) -> Finding:
    return passed(", ".join(f"{name} {found}" for name, found in installed.versions().items() if name != "python"))


def packages(machine: Machine) -> Finding:
    """What the trainer is declared to need, Megatron-Bridge included."""
    lines, remedies = [], []
    for need in map(Requirement, installed.requirements()):
        extras = ("", installed.TRAINER, installed.BRIDGE)
        if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        found = installed.installed(need.name)
        if found is not None and need.specifier.contains(found, prereleases=True):
            continue
        options = " --no-deps" if need.name == installed.WITHOUT_DEPENDENCIES else ""
        state = f"is {found}" if found else "is not installed"
        lines.append(f"{need.name} {state}, needed is {str(need.specifier) or 'any'}")
        remedies.append(f"pip install{options} '{need.name}{need.specifier}'")
    if lines:
        return failed("\n".join(lines), "\n".join(remedies))
    return passed("all are installed, in versions that fit")


def driver(machine: Machine) -> Finding:
    """The GPUs that NVIDIA's driver lists."""
    if machine.driver_error:
        return failed(machine.driver_error)
    if not machine.gpus:
        return passed("none: models are computed on the CPU")
    lines = [f"{gpu.name}, {gpu.bytes / 1e9:.1f} GB, compute capability {gpu.capability}" for gpu in machine.gpus]
    if not machine.has_te:
        lines.append("without transformer-engine (fused kernels, FP8, context parallelism)")
    return passed("\n".join(lines))


def memory(machine: Machine) -> Finding:
    return passed(f"{host_memory.total_bytes() / 1e9:.1f} GB of the host")


def gpus(machine: Machine) -> Finding:
    """Torch must see the GPUs that the driver lists."""
    if machine.driver_error:
        return failed(machine.driver_error)
    if not machine.gpus:
        return impossible("no driver of NVIDIA's (nvidia-smi): models are computed on the CPU, over gloo")
    seen = machine.run(_gpus_of_torch)
    if not seen:
        return failed(f"nvidia-smi shows {len(machine.gpus)} GPUs, torch none")
    first = machine.gpus[0]
    return passed(f"{seen} GPUs of {first.name}, {first.bytes / 1e9:.0f} GB, capability {first.capability}", gpus=seen)


def _gpus_of_torch() -> int:
    import torch

    return torch.cuda.device_count()


def transformer_engine(machine: Machine) -> Finding:
    """Imported, with its compiled part, which may be missing where the package is installed; and what else computes
    faster where it is there, whose absence costs speed alone."""
    if not machine.gpus:
        return impossible("Transformer Engine needs a GPU")
    found = machine.run(_fused_kernels)
    said = "\n".join(f"{part}: {state}" for part, state in found.items())
    return failed(said) if found["Transformer Engine"].startswith("absent") else passed(said)


def _fused_kernels() -> dict[str, str]:
    from nemo_edo.megatron.implementations import fused_kernels

    return fused_kernels()


def nccl(machine: Machine) -> Finding:
    """The library through which a refit sends weights. Needs no GPU: NCCL tells its version without."""
    if why := no_server():
        return impossible(why)
    said = machine.run(_nccl)
    if said is None:
        return impossible("the servers' environment has no package nvidia-nccl: a vLLM for CPUs, refitted by disk")
    return passed(said)


def _nccl() -> str | None:
    from nemo_edo.config import ServersConfig
    from nemo_edo.generation.servers import server_python
    from nemo_edo.refit.libnccl import Library, in_words
    from nemo_edo.utils.processes import package_file

    path = package_file(server_python(ServersConfig()), "nvidia.nccl", "lib/libnccl.so.2")
    return None if path is None else in_words(Library(path))


def no_server() -> str | None:
    """Why this machine can start no vLLM server; None where it can."""
    from nemo_edo.config import ServersConfig
    from nemo_edo.errors import UserError
    from nemo_edo.generation.servers import check_environment
    from nemo_edo.generation.vllm_server import VLLM

    try:
        check_environment(ServersConfig(), VLLM, gpus=0)
    except UserError as error:
        return str(error)
    return None
