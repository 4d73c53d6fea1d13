"""Checks of the machine: what is installed, what each rank has and can reach, and which node is at fault.

Ranks make the later ones together. A collective that hangs does not say why, so the all-reduce comes last.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from nemo_edo.checks import installed
from nemo_edo.checks.machine import CheckError, Finding, Machine, failed, impossible, passed
from nemo_edo.errors import UserError
from nemo_edo.utils.files import end_of_log
from nemo_edo.utils.processes import kept
from nemo_edo.utils.ranks import first_that_resolves, free_server

NEIGHBOURS = 4  # ranks that each rank connects to: with all, 512 ranks would open 260,000 connections
TOLERANCE_S = 5.0  # between the clocks of two nodes: above it the times of files and log lines mislead
PROBE_BYTES = 32 * 2**20
APPEARS_S = 30.0  # the time that network file systems take to show a file on another node
LARGE, SMALL = 256 * 2**20, 4 * 2**20  # bytes of an all-reduce with GPUs and without
ROUNDS = 5


# --- what is installed ------------------------------------------------------------------------------------------------


def packages(machine: Machine) -> Finding:
    """The trainer's declared requirements, Megatron-Bridge included."""
    faults, extras = [], ("", installed.TRAINER, installed.BRIDGE)
    for need in map(Requirement, installed.requirements()):
        if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        found = installed.installed(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            options = " --no-deps" if need.name == installed.WITHOUT_DEPENDENCIES else ""
            state = f"{need.name} {f'is {found}' if found else 'is not installed'}, needed is {need.specifier or 'any'}"
            faults.append(f"{state}: pip install{options} '{need.name}{need.specifier}'")
    return failed("\n".join(faults)) if faults else passed("all are installed, in versions that fit")


def driver(machine: Machine) -> Finding:
    """The GPUs that NVIDIA's driver lists."""
    if error := machine.facts[machine.rank]["driver_error"]:
        return failed(error)
    if not machine.gpus:
        return passed("none: models are computed on the CPU")
    lines = [f"{gpu.name}, {gpu.bytes / 1e9:.1f} GB, compute capability {gpu.capability}" for gpu in machine.gpus]
    if not machine.has_te:
        lines.append("without transformer-engine (fused kernels, FP8, context parallelism)")
    return passed("\n".join(lines))


def gpus(machine: Machine) -> Finding:
    """Torch must see the GPUs that the driver lists."""
    if error := machine.facts[machine.rank]["driver_error"]:
        return failed(error)
    seen, expected = len(machine.facts[machine.rank]["gpus"]), machine.gpus_expected
    if seen < expected and "MIG-" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return failed(f"nvidia-smi shows {seen} GPUs of cluster.gpus_per_node={expected}")
    if not machine.gpus:
        return impossible("no driver of NVIDIA's (nvidia-smi): models are computed on the CPU, over gloo")
    import torch

    seen = machine.run(torch.cuda.device_count)
    if not seen:
        return failed(f"nvidia-smi shows {len(machine.gpus)} GPUs, torch none")
    first = machine.gpus[0]
    return passed(f"{seen} GPUs of {first.name}, {first.bytes / 1e9:.0f} GB, capability {first.capability}", gpus=seen)


def transformer_engine(machine: Machine) -> Finding:
    """Imported, with its compiled part, which may be missing where the package is installed; and other packages that
    compute faster, whose absence costs speed alone."""
    if not machine.gpus:
        return impossible("Transformer Engine needs a GPU")
    found = machine.run(_fused_kernels)
    detail = "\n".join(f"{part}: {state}" for part, state in found.items())
    return failed(detail) if found["Transformer Engine"].startswith("absent") else passed(detail)


def _fused_kernels() -> dict[str, str]:
    from nemo_edo.megatron.layer_spec import fused_kernels  # an import may crash its process

    return fused_kernels()


def nccl(machine: Machine) -> Finding:
    """The library through which a refit sends weights. NCCL tells its version without a GPU, too."""
    if why := no_server():
        return impossible(why)
    found = machine.run(_nccl)
    if found is None:
        return impossible("the servers' environment has no package nvidia-nccl: a vLLM for CPUs, refitted by disk")
    return passed(found)


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
    from nemo_edo.generation.server_api import VLLM
    from nemo_edo.generation.servers import check_environment

    try:
        check_environment(ServersConfig(), VLLM, gpus=0)
    except UserError as error:
        return str(error)
    return None


# --- what ranks have and can reach ------------------------------------------------------------------------------------


def same_on_all_ranks(machine: Machine) -> Finding:
    """The facts of all ranks. Where ranks differ, later checks may wait for ever."""
    reported = {rank: facts for rank, facts in enumerate(machine.facts) if facts is not None}
    absent = "has not reported: it did not start, or cannot connect to the first node"
    faults = [f"{machine.named(rank)} {absent}" for rank in range(machine.world) if rank not in reported]
    values = {}
    for rank, facts in reported.items():
        found = ", ".join(f"{len(facts['gpus'])} {gpu['name']}" for gpu in facts["gpus"][:1]) or "none"
        values[rank] = {"GPUs": found} | facts["versions"]
    for name in dict.fromkeys(name for of_rank in values.values() for name in of_rank):
        of_ranks = {rank: of_rank.get(name) or "absent" for rank, of_rank in values.items()}
        [(usual, _)] = Counter(of_ranks.values()).most_common(1)
        for rank, found in of_ranks.items():
            if found != usual:
                faults.append(f"{machine.named(rank)} has {name} {found}, most have {usual}")
    if faults:
        return failed("\n".join(faults))
    hosts = len({facts["host"] for facts in reported.values()})
    return passed(f"GPUs and versions of {machine.world} ranks on {hosts} node{'s' if hosts > 1 else ''}")


def connections(machine: Machine) -> Finding:
    """Each rank connects to the next ones, and to the one at its place on the next node."""
    with free_server(2 * NEIGHBOURS) as listening:  # the kernel answers
        ports = machine.exchange("ports", listening.getsockname()[1])
        steps = {*range(1, NEIGHBOURS + 1), machine.local_size}
        failures = []
        for other in sorted({(machine.rank + step) % machine.world for step in steps} - {machine.rank}):
            slurms = machine.nodes[other // machine.local_size] if machine.nodes else ""
            try:
                address = first_that_resolves(slurms, machine.facts[other]["host"])
                socket.create_connection((address, ports[other]), timeout=5).close()
            except (OSError, UserError) as error:
                failures.append([other, f"port {ports[other]}: {error}"])
        unreached = machine.exchange("unreached", failures)
    faults = []
    for rank, count in Counter(other for of_rank in unreached for other, _ in of_rank or ()).items():
        if count >= min(2, machine.world - 1):
            faults.append(f"{machine.named(rank)} cannot be reached by {count} others")
    for rank, of_rank in enumerate(unreached):
        if of_rank is None:
            faults.append(f"{machine.named(rank)} has stopped answering")
        for other, why in of_rank or ():
            faults.append(f"{machine.named(rank)} cannot connect to {machine.named(other)} ({why})")
    return failed("\n".join(faults)) if faults else passed("each rank reaches its neighbours")


def clocks(machine: Machine) -> Finding:
    machine.exchange("ready", None)  # all return from this at about the same time
    times = {rank: now for rank, now in enumerate(machine.exchange("times", time.time())) if now is not None}
    usual = statistics.median(times.values())
    far = {rank: now - usual for rank, now in times.items() if abs(now - usual) > TOLERANCE_S}
    if far:
        return failed("\n".join(f"the clock of {machine.named(rank)} is {off:+.1f} s off" for rank, off in far.items()))
    return passed(f"within {max(times.values()) - min(times.values()):.1f} s")


def shared_folder(machine: Machine) -> Finding:
    """Every rank writes a file, and sees those of the first rank and of the next node's. None is left: a later check
    would take it for its own."""

    def probe(rank: int) -> Path:
        return machine.folder / f".probe_{os.environ.get('SLURM_JOB_ID', '0')}_{rank}"

    def appears(path: Path) -> bool:
        end = time.monotonic() + APPEARS_S
        while not path.exists() or path.stat().st_size != PROBE_BYTES:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    begin, error = time.perf_counter(), None
    try:
        if not machine.nodes:  # a job's folder is there, or the node does not see it
            machine.folder.mkdir(parents=True, exist_ok=True)
        with probe(machine.rank).open("wb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        error = failure.strerror
    rate = PROBE_BYTES / (time.perf_counter() - begin) / 1e6
    written = machine.exchange("written", error is None)
    others = {0, (machine.rank + machine.local_size) % machine.world} if error is None else set()
    unseen = [other for other in sorted(others) if written[other] and not appears(probe(other))]
    rates = [found for found in machine.exchange("seen", rate) if found is not None]
    with contextlib.suppress(OSError):  # it was not written, as the finding says
        probe(machine.rank).unlink()
    if error is not None:
        return failed(f"cannot write to the shared folder {machine.folder} ({error})")
    if unseen:
        names = ", ".join(map(machine.named, unseen))
        return failed(f"does not see in the shared folder {machine.folder} what was written by {names}")
    speed = f"{min(rates):,.0f}" if machine.world == 1 else f"{min(rates):,.0f} to {max(rates):,.0f}"
    return passed(f"{speed} MB/s of a process, written to {machine.folder}", write_mb_per_s=rate)


def all_reduce(machine: Machine) -> Finding:
    """An all-reduce over all ranks, with the backend of the training."""
    size = LARGE if machine.gpus else SMALL
    right, seconds = machine.run(_all_reduce, size, world=True, limit_s=min(60.0, machine.limit_s))
    if not right:
        return failed("the sum over the ranks is wrong")
    rate = 2 * (machine.world - 1) / machine.world * size / seconds / 1e9
    return passed(f"{rate:.2f} GB/s bus bandwidth between {machine.world} ranks", bus_gb_per_s=rate)


def _all_reduce(num_bytes: int) -> tuple[bool, float]:
    """(The sums are right, the seconds of one all-reduce)."""
    import torch

    from nemo_edo.megatron import platform

    device = torch.device("cpu")  # without Megatron, whose imports take longer than all else here
    if torch.cuda.is_available():
        device = platform.local_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    platform.init_process_group(device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensor = torch.full((num_bytes // 4,), float(rank + 1), device=device)
    torch.distributed.all_reduce(tensor)  # the first one starts the links
    right = bool((tensor == world * (world + 1) / 2).all())
    return right, seconds_of(lambda: torch.distributed.all_reduce(tensor.zero_()), ROUNDS)


def seconds_of(call: Callable[[], Any], rounds: int) -> float:
    """The mean time of one call; the first two, which prepare the others, are not counted."""
    import torch
    from torch.utils.benchmark import Timer

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()).timeit(rounds).mean


# --- servers ----------------------------------------------------------------------------------------------------------

SERVER_LIMIT_S = 240.0
SMALL_RUN = [
    "generation=vllm", "arms={grpo: {algorithm: grpo, alpha: 0}}", "data.arithmetic.train_problems=64",
    "data.arithmetic.test_problems=8", "sft.steps=2", "sft.micro_batch_size=32", "grpo.iterations=2",
    "grpo.problems_per_iteration=8", "grpo.minibatch_size=32", "grpo.micro_batch_size=32",
    "sampling.samples_per_prompt=8", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
    "generation.servers.restarts=0",  # a run restarts a server that has died; here it is what is looked for
]  # fmt: skip
GAP = {"fp32": 1e-2, "bf16": 0.2}  # nats: the mean distance of the server's log-probabilities from the trainer's


def server_run(machine: Machine, *more: str) -> Finding:
    """A run of the built-in task in small, with a vLLM server whose weights are replaced between two iterations."""
    from nemo_edo.generation.replica import START
    from nemo_edo.run_folder import RunFolder

    # The first rank starts servers; all ranks must decide alike.
    if why := machine.exchange("no_server", no_server() if machine.rank == 0 else None)[0]:
        return impossible(why)
    precision = "bf16" if machine.gpus else "fp32"
    folder = machine.folder / machine.check.replace(" ", "_").replace(",", "")
    settings = [*SMALL_RUN, f"precision={precision}", f"output_dir={folder}", "name=run", *more]
    if machine.rank == 0:  # an earlier selftest's; the other ranks begin after this
        shutil.rmtree(folder, ignore_errors=True)
    faults = []
    try:
        machine.run(_train, settings, world=True, limit_s=SERVER_LIMIT_S)
    except CheckError as error:
        faults.append(str(error))
    if machine.rank > 0 and not faults:
        return passed("")
    logs = sorted(folder.glob("run/servers/server_*.log"))
    starts = {log: log.read_text(encoding="utf-8", errors="replace").count(START) for log in logs}
    again = [log for log, count in starts.items() if count > 1]
    faults += [f"its server died and was restarted at a refit ({starts[log]} starts)" for log in again]
    if faults:
        log = (again or [*starts] or [folder / "run" / "servers"])[0]
        return failed("; ".join(faults), f"read {log}; docs/servers.md has what a server needs")
    gap = max(line["sampler_gap"] for line in RunFolder(folder / "run").lines() if "sampler_gap" in line)
    said = f"log-probabilities are {gap:.1e} nats from the trainer's, in 2 iterations"
    if not gap <= GAP[precision]:  # NaN is too far
        remedy = "the server computes with other weights, or in another precision: docs/servers.md"
        return failed(f"{said}; expected at most {GAP[precision]:.0e}", remedy, sampler_gap=gap)
    return passed(said, sampler_gap=gap)


def server_on_another_node(machine: Machine) -> Finding:
    """``server_run`` with the server on the last node, where a job's own task starts it (``cluster.task serve``)."""
    from nemo_edo.config.compose import compose_run, resolved_yaml

    place, folder, key = machine.world - machine.local_size, machine.folder / "server_node", "NEMO_EDO_SERVER_KEY"
    if why := machine.exchange("no_server_there", no_server() if machine.rank == place else None)[place]:
        return impossible(why)
    os.environ[key] = machine.exchange("key", secrets.token_hex(24))[0]
    serving, urls, log = None, None, folder / "task.log"
    try:
        if machine.rank == place:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            own = [f"precision={'bf16' if machine.gpus else 'fp32'}", f"output_dir={folder}", "name=run"]
            free = f"generation.servers.first_gpu={machine.local_size if machine.gpus else 0}"
            (folder / "0.yaml").write_text(resolved_yaml(compose_run("quickstart", [*SMALL_RUN, *own, free])))
            ready = folder / "servers_0.json"
            task = {"NEMO_EDO_CONTROL": str(folder), "SLURM_PROCID": "0", "SLURMD_NODENAME": socket.gethostname()}
            command = kept([sys.executable, "-m", "nemo_edo.cluster.task", str(folder / "0.json"), "serve"])
            with log.open("wb") as output:
                serving = subprocess.Popen(command, env={**os.environ, **task}, stdout=output, stderr=subprocess.STDOUT)
            deadline = time.monotonic() + SERVER_LIMIT_S
            while serving.poll() is None and not ready.is_file() and time.monotonic() < deadline:
                time.sleep(0.5)
            urls = json.loads(ready.read_text()) if ready.is_file() else None
        if (urls := machine.exchange("urls", urls)[place]) is None:
            fault = f"the server of {machine.named(place)} was not ready{end_of_log(log)}"
            return failed(fault, "docs/slurm.md, Servers in the same job, has what it needs")
        at = f"generation.servers.urls={json.dumps(urls)}"
        return server_run(machine, at, f"generation.servers.api_key_variable={key}", "generation.servers.launched=true")
    finally:
        if serving is not None:
            serving.terminate()
            serving.wait()


def _train(settings: list[str]) -> None:
    """A run, as ``nemo-edo train`` carries it out: the first rank controls it, the others are its workers."""
    from nemo_edo.checks.preflight import preflight
    from nemo_edo.config.compose import compose_run
    from nemo_edo.run import jobs
    from nemo_edo.worker.dispatch import dismiss
    from nemo_edo.worker.serve import serve

    if os.environ.get("RANK", "0") != "0":
        serve()
        return
    has_ended = False
    try:
        jobs.train(preflight(compose_run("quickstart", settings)))
        has_ended = True
    finally:
        dismiss(met_only=not has_ended)
