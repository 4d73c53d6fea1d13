"""Checks that ranks make together: what each has and can reach, and which node is at fault. A collective that hangs
does not say why, so the all-reduce comes last."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections import Counter
from pathlib import Path

from nemo_edo.checks.findings import Finding, failed, passed
from nemo_edo.checks.machine import Machine
from nemo_edo.errors import UserError
from nemo_edo.utils.slurm_tasks import first_that_resolves

NEIGHBOURS = 4
"""Ranks that each rank connects to: with all, 512 ranks would open 260,000 connections."""
TOLERANCE_S = 5.0
"""Difference between the clocks of two nodes above which the times of files and log lines mislead."""
PROBE_BYTES = 32 * 2**20
APPEARS_S = 30.0
"""The time that network file systems take to show a file on another node."""
LARGE, SMALL = 256 * 2**20, 4 * 2**20
"""Bytes of an all-reduce with GPUs and without."""
ROUNDS = 5


def several(machine: Machine) -> str | None:
    if machine.world > 1:
        return None
    return "it needs several processes: torchrun --nproc-per-node N --no-python nemo-edo selftest"


def same_on_all_ranks(machine: Machine) -> Finding:
    """On ranks that differ, whatever follows may wait for ever."""
    faults = [
        f"{machine.named(rank)} has not reported: it did not start, or cannot connect to the first node"
        for rank, facts in enumerate(machine.facts)
        if facts is None
    ]
    reported = {rank: facts for rank, facts in enumerate(machine.facts) if facts is not None}
    values = {
        rank: {"GPUs": ", ".join(f"{len(facts['gpus'])} {gpu['name']}" for gpu in facts["gpus"][:1]) or "none"}
        | {name: found or "absent" for name, found in facts["versions"].items()}
        for rank, facts in reported.items()
    }
    for name in dict.fromkeys(name for of_rank in values.values() for name in of_rank):
        usual, _ = Counter(of_rank.get(name, "absent") for of_rank in values.values()).most_common(1)[0]
        faults += [
            f"{machine.named(rank)} has {name} {of_rank.get(name, 'absent')}, most have {usual}"
            for rank, of_rank in values.items()
            if of_rank.get(name, "absent") != usual
        ]
    if faults:
        return failed("\n".join(faults))
    hosts = len({facts["host"] for facts in reported.values()})
    return passed(f"GPUs and versions of {machine.world} ranks on {hosts} node{'s' if hosts > 1 else ''}")


# --- connections ------------------------------------------------------------------------------------------------------


def connections(machine: Machine) -> Finding:
    """Each rank connects to the next ones, and to the one at its place on the next node."""
    with socket.create_server(("", 0), backlog=2 * NEIGHBOURS) as listening:  # the kernel answers
        ports = machine.exchange("ports", listening.getsockname()[1])
        steps = {*range(1, NEIGHBOURS + 1), machine.local_size}
        others = sorted({(machine.rank + step) % machine.world for step in steps} - {machine.rank})
        reasons = {other: _unreached(machine, other, ports[other]) for other in others}
        unreached = machine.exchange("unreached", [[other, why] for other, why in reasons.items() if why])
    blamed = Counter(other for of_rank in unreached for other, _ in of_rank or ())
    faults = [
        f"{machine.named(rank)} cannot be reached by {count} others"
        for rank, count in blamed.items()
        if count >= min(2, machine.world - 1)
    ]
    for rank, of_rank in enumerate(unreached):
        faults += [
            f"{machine.named(rank)} cannot connect to {machine.named(other)} ({why})" for other, why in of_rank or ()
        ]
        faults += [f"{machine.named(rank)} has stopped answering"] if of_rank is None else []
    return failed("\n".join(faults)) if faults else passed("each rank reaches its neighbours")


def _unreached(machine: Machine, other: int, port: int | None) -> str | None:
    """Why this rank cannot connect to another one."""
    slurms = machine.nodes[other // machine.local_size] if machine.nodes else ""
    try:
        address = first_that_resolves(slurms, machine.facts[other]["host"])
        socket.create_connection((address, port), timeout=5).close()
    except (OSError, UserError) as error:
        return f"port {port}: {error}"
    return None


def clocks(machine: Machine) -> Finding:
    machine.exchange("ready", None)  # all return from this at about the same time
    times = machine.exchange("times", time.time())
    usual = statistics.median(filter(None, times))
    far = {rank: now - usual for rank, now in enumerate(times) if now is not None and abs(now - usual) > TOLERANCE_S}
    if far:
        return failed("\n".join(f"the clock of {machine.named(rank)} is {off:+.1f} s off" for rank, off in far.items()))
    return passed(f"within {max(filter(None, times)) - min(filter(None, times)):.1f} s")


# --- the shared folder ------------------------------------------------------------------------------------------------


def shared_folder(machine: Machine) -> Finding:
    """Every rank writes a file, and sees those of the first rank and of the next node's. None is left: a later check
    would take it for its own."""
    probe = _probe(machine, machine.rank)
    begin, error = time.perf_counter(), None
    try:
        if not machine.nodes:  # a job's folder is there, or the node does not see it
            machine.folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        error = failure.strerror
    rate = PROBE_BYTES / (time.perf_counter() - begin) / 1e6
    written = machine.exchange("written", error is None)
    others = {0, (machine.rank + machine.local_size) % machine.world} if error is None else set()
    unseen = [other for other in sorted(others) if written[other] and not _appears(_probe(machine, other))]
    rates = machine.exchange("seen", rate)
    with contextlib.suppress(OSError):  # it was not written, as the finding says
        probe.unlink()
    if error is not None:
        return failed(f"cannot write to the shared folder {machine.folder} ({error})")
    if unseen:
        names = ", ".join(map(machine.named, unseen))
        return failed(f"does not see in the shared folder {machine.folder} what was written by {names}")
    slowest, fastest = min(filter(None, rates)), max(filter(None, rates))
    speed = f"{slowest:,.0f}" if machine.world == 1 else f"{slowest:,.0f} to {fastest:,.0f}"
    return passed(f"{speed} MB/s of a process, written to {machine.folder}", write_mb_per_s=rate)


def _probe(machine: Machine, rank: int) -> Path:
    return machine.folder / f".probe_{os.environ.get('SLURM_JOB_ID', '0')}_{rank}"


def _appears(path: Path) -> bool:
    end = time.monotonic() + APPEARS_S
    while not path.exists() or path.stat().st_size != PROBE_BYTES:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


# --- all-reduce -------------------------------------------------------------------------------------------------------


def all_reduce(machine: Machine) -> Finding:
    """Over all ranks, with the backend of the training."""
    size = LARGE if machine.gpus else SMALL
    right, seconds = machine.run(_all_reduce, size, world=True, limit_s=min(60.0, machine.ranks.limit_s))
    if not right:
        return failed("the sum over the ranks is wrong")
    rate = 2 * (machine.world - 1) / machine.world * size / seconds / 1e9
    return passed(f"{rate:.2f} GB/s bus bandwidth between {machine.world} ranks", bus_gb_per_s=rate)


def _all_reduce(num_bytes: int) -> tuple[bool, float]:
    """Whether the sums are right, and the seconds of one all-reduce."""
    import torch

    from nemo_edo.megatron import platform

    device = torch.device("cpu")  # without Megatron, whose imports take longer than all else here
    if torch.cuda.is_available():
        device = platform.local_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    platform.init_process_group(device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensor = torch.full((num_bytes // 4,), float(rank + 1), device=device)
    torch.distributed.all_reduce(tensor)
    right = bool((tensor == world * (world + 1) / 2).all())
    begin = 0.0
    for repetition in range(ROUNDS + 1):
        if repetition == 1:  # the first one starts the links
            torch.distributed.barrier()
            begin = time.perf_counter()
        torch.distributed.all_reduce(tensor.zero_())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return right, (time.perf_counter() - begin) / ROUNDS
