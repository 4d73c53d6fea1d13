"""The NCCL of torch, through which the trainer's ranks communicate, and that of the servers' environment, through which
a refit sends weights. The trainer then loads both, since NCCL refuses ranks of different versions."""

from __future__ import annotations

import sys

from nemo_edo.selftest.isolated import CheckError
from nemo_edo.selftest.outcome import Outcome, failed, impossible, passed
from nemo_edo.selftest.this_machine import Machine

LIMIT_S = 60.0


def same_version(machine: Machine, number: int) -> Outcome:
    """Needs no GPU: NCCL tells its version without."""
    if machine.rank > 0:
        return passed("on rank 0")
    if machine.no_server is not None:
        return impossible(machine.no_server)
    try:
        trainer, server = machine.isolation.run(number, _versions, world=False, limit_s=LIMIT_S)
    except CheckError as error:
        return failed(str(error), "reinstall the package nvidia-nccl of that environment; docs/servers.md")
    if server is None:
        return impossible("the servers' environment has no package nvidia-nccl: a vLLM for CPUs, refitted by disk")
    if trainer is None:
        return impossible(f"torch is built without NCCL and has no package nvidia-nccl; the servers have {server[0]}")
    if trainer[0] == server[0]:
        return passed(f"{trainer[0]} in the trainer ({trainer[1]}) and the servers ({server[1]})")
    return failed(
        f"the trainer has {trainer[0]} ({trainer[1]}), the servers {server[0]} ({server[1]})",
        "install the same version of nvidia-nccl in both environments, or start the trainer with "
        f"LD_PRELOAD={server[1]}; until then refit by disk (generation.refit.transport=disk)",
    )


def _versions() -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
    """(Version, place) of the trainer's and the servers' NCCL; None where there is none. Raises NCCLError for a file
    that is no NCCL."""
    from nemo_edo.config import ServersConfig
    from nemo_edo.generation.servers import server_python
    from nemo_edo.refit.libnccl import Library
    from nemo_edo.utils.processes import package_file

    def of_environment(python: str) -> tuple[str, str] | None:
        path = package_file(python, "nvidia.nccl", "lib/libnccl.so.2")
        return None if path is None else (Library(path).version, path)

    import torch

    if hasattr(torch._C, "_nccl_version"):
        trainer = ".".join(map(str, torch.cuda.nccl.version()[:3])), "torch's"
    else:
        trainer = of_environment(sys.executable)
    return trainer, of_environment(server_python(ServersConfig()))
