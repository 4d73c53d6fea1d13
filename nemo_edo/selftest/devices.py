"""Checks of the machine itself: its devices, packages, links and folder."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from nemo_edo.doctor.machine import needed_packages
from nemo_edo.selftest.isolated import CheckError
from nemo_edo.selftest.outcome import Outcome, failed, impossible, passed
from nemo_edo.selftest.this_machine import OTHER_FOLDER, Machine

PROBE_BYTES = 64 * 2**20
LARGE, SMALL = 256 * 2**20, 4 * 2**20
"""Bytes of an all-reduce with GPUs and without."""
ROUNDS = 5
LIMIT_S = 60.0


def packages(machine: Machine, number: int) -> Outcome:
    wrong = [package for package in needed_packages() if not package.satisfies]
    if wrong:
        said = ", ".join(f"{package.name} {package.found or 'is missing'}" for package in wrong)
        return failed(said, "; ".join(package.remedy for package in wrong))
    return passed("all are installed, in versions that fit")


def alike(machine: Machine, number: int) -> Outcome:
    """On ranks that differ, whatever follows may wait for ever."""
    if machine.world == 1:
        return impossible("one process")
    if odd := machine.odd_ones():
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        return failed(odd[0] + more, "start every rank in the same image or environment, on nodes of the same kind")
    hosts = len({of_rank["host"] for of_rank in machine.facts})
    return passed(f"GPUs and versions of {machine.world} ranks on {hosts} node{'s' if hosts > 1 else ''}")


def devices(machine: Machine, number: int) -> Outcome:
    """Torch must see the GPUs that the driver shows."""
    if not machine.gpus:
        return impossible("no driver of NVIDIA's (nvidia-smi): models are computed on the CPU, over gloo")
    remedy = "install a torch that is built for CUDA and for this driver, and see to CUDA_VISIBLE_DEVICES"
    try:
        seen = machine.isolation.run(number, _gpus_of_torch, world=False, limit_s=LIMIT_S)
    except CheckError as error:
        return failed(str(error), remedy)
    if not seen:
        return failed(f"nvidia-smi shows {len(machine.gpus)} GPUs, torch none", remedy)
    first = machine.gpus[0]
    return passed(f"{seen} GPUs of {first.name}, {first.bytes / 1e9:.0f} GB, capability {first.capability}", gpus=seen)


def transformer_engine(machine: Machine, number: int) -> Outcome:
    if not machine.gpus:
        return impossible("Transformer Engine needs a GPU")
    remedy = "pip install 'transformer-engine[pytorch]' as the Dockerfile does; without it there is no FP8, no context \
parallelism, and torch's attention"
    if not machine.has_te:
        return failed("it is not installed", remedy)
    try:
        said = machine.isolation.run(number, _import_te, world=False, limit_s=LIMIT_S)
    except CheckError as error:
        return failed(str(error), remedy)
    return passed(f"version {said}")


def shared_folder(machine: Machine, number: int) -> Outcome:
    """Every rank writes a file, and rank 0's is there for all. None is left: a later selftest would take it for its
    own."""
    outcome = _probed(machine)
    machine.isolation.ranks.meet("probed")
    with contextlib.suppress(OSError):  # then it was not written, and the outcome says so
        (machine.folder / f"probe_{machine.rank}").unlink()
    return outcome


def _probed(machine: Machine) -> Outcome:
    remedy = OTHER_FOLDER
    probe = machine.folder / f"probe_{machine.rank}"
    try:
        machine.folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with probe.open("wb") as file:
            file.write(os.urandom(2**20) * (PROBE_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - begin
        whole = probe.stat().st_size == PROBE_BYTES
    except OSError as error:
        return failed(f"{machine.folder}: {error.strerror}", remedy)
    if not whole or not _appears(machine.folder / "probe_0"):
        return failed(f"{machine.folder}: the file of rank 0 is not seen by rank {machine.rank}", remedy)
    rate = PROBE_BYTES / seconds / 1e6
    return passed(f"{rate:,.0f} MB/s written to {machine.folder}", write_mb_per_s=rate)


def all_reduce(machine: Machine, number: int) -> Outcome:
    if machine.world == 1:
        return impossible("one process; for several: torchrun --nproc-per-node N --no-python nemo-edo selftest")
    remedy = "run with NCCL_DEBUG=INFO (GPUs) and see which interface is taken; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    size = LARGE if machine.gpus else SMALL
    try:
        right, seconds = machine.isolation.run(number, _all_reduce, size, world=True, limit_s=LIMIT_S)
    except CheckError as error:
        return failed(str(error), remedy)
    if not right:
        return failed("the sum over the ranks is wrong", remedy)
    rate = 2 * (machine.world - 1) / machine.world * size / seconds / 1e9
    return passed(f"{rate:.2f} GB/s bus bandwidth between {machine.world} ranks", bus_gb_per_s=rate)


def _appears(path: Path, limit_s: float = 30.0) -> bool:
    """Whether a file of another node is seen within the time that network file systems take."""
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _gpus_of_torch() -> int:
    import torch

    return torch.cuda.device_count()


def _import_te() -> str:
    import transformer_engine
    import transformer_engine.pytorch  # its compiled part, which may be missing where the package is there

    return transformer_engine.__version__


def _all_reduce(num_bytes: int) -> tuple[bool, float]:
    """Whether the sums are right, and the seconds of one all-reduce."""
    import torch

    from nemo_edo.megatron import platform

    device = platform.enter()
    platform.init_process_group(device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensor = torch.full((num_bytes // 4,), float(rank + 1), device=device)
    torch.distributed.all_reduce(tensor)
    right = bool((tensor == world * (world + 1) / 2).all())
    _wait(device)
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        torch.distributed.all_reduce(tensor.zero_())
    _wait(device)
    return right, (time.perf_counter() - begin) / ROUNDS


def _wait(device) -> None:
    import torch

    torch.distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
