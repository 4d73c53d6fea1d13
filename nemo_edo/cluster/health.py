"""The health check of all nodes before a run: what each process has and can reach, and which node is at fault.

    srun ... python -m nemo_edo.cluster.health --folder SHARED --limit 60 --nodes n1,n2

Each process reports on its machine to the first one through a TCP store, connects to its neighbours, writes to the
shared folder and checks the others' files there. Only if all that succeeds do they run an all-reduce (NCCL with GPUs,
gloo without): a collective that hangs does not say why.

Exits with status 0 if all nodes are healthy, otherwise with 4. The first process prints a line that begins with
"nemo-edo:" for each fault.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch

from nemo_edo.cluster.names import first_that_resolves
from nemo_edo.doctor.machine import ABOUT, installed, python_version
from nemo_edo.megatron.platform import local_gpu

UNHEALTHY = 4
PROBE_BYTES = 32 * 1024**2
NEIGHBOURS = 4
"""Ranks that each rank connects to: with all, 512 ranks would open 260,000 connections."""
CLOCK_TOLERANCE_S = 5.0
"""Difference between the clocks of two nodes above which the times of files and log lines mislead."""


@dataclass
class Report:
    """One process's report."""

    rank: int
    host: str
    gpus: int
    versions: dict[str, str]
    port: int
    write_s: float | None = None
    """Seconds to write PROBE_BYTES to the shared folder."""
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Where this process is, by Slurm's variables."""

    rank: int
    size: int
    local_size: int
    nodes: tuple[str, ...]

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // self.local_size] if self.nodes else "?"

    def named(self, rank: int) -> str:
        return f"rank {rank} (node {self.node_of(rank)})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all of it")
    parser.add_argument("--nodes", default="", help="the nodes' names in the order of their ranks")
    args = parser.parse_args(argv)
    place = place_of(os.environ, tuple(filter(None, args.nodes.split(","))))
    begun = time.monotonic()
    faults = check(place, args.folder, args.limit)
    seconds = time.monotonic() - begun
    if faults is None:  # this process could not reach the first one
        return UNHEALTHY
    if place.rank == 0:
        for fault in faults:
            print(f"nemo-edo: {fault}")
        verdict = f"{len(faults)} faults" if faults else "all healthy"
        print(f"nemo-edo: {place.size} processes checked in {seconds:.1f} s: {verdict}")
    sys.stdout.flush()
    return UNHEALTHY if faults else 0


def place_of(environment: Mapping[str, str], nodes: tuple[str, ...] = ()) -> Place:
    size = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("WORLD_SIZE", "1")))
    rank = int(environment.get("SLURM_PROCID", environment.get("RANK", "0")))
    return Place(rank, size, -(-size // max(1, len(nodes))), nodes)


def check(place: Place, folder: Path, limit_s: float) -> list[str] | None:
    """The faults of all processes, the same list on each; None where this process cannot reach the first."""
    deadline = time.monotonic() + limit_s
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    try:
        store = torch.distributed.TCPStore(
            host, port, None, place.rank == 0, timedelta(seconds=limit_s / 3), wait_for_workers=False
        )
    except torch.distributed.DistError as error:
        what = "cannot listen on" if place.rank == 0 else "cannot reach the first process at"
        print(f"nemo-edo: {place.named(place.rank)} {what} {host}:{port}: {_first_line(error)}")
        return None
    with _Listener() as listener:
        report = _own_report(place, folder, listener.port)
        store.set(f"report/{place.rank}", json.dumps(asdict(report)))
        if place.rank == 0:
            faults = _faults_in_reports(place, store, deadline - limit_s / 2)
            store.set("faults", json.dumps(faults))
        faults = json.loads(_get(store, "faults", deadline))
        if not faults:
            unreached = _unreached(place, store, folder)
            store.set(f"reached/{place.rank}", json.dumps(unreached))
            if place.rank == 0:
                store.set("faults2", json.dumps(_faults_in_connections(place, store, deadline - limit_s / 5)))
            faults = json.loads(_get(store, "faults2", deadline))
    if not faults:
        faults = _all_reduce(place, store, deadline)
    _leave(place, store)
    _probe(folder, place.rank).unlink(missing_ok=True)
    return faults


# --- one process's report ----------------------------------------------------------------------------------------


def _own_report(place: Place, folder: Path, port: int) -> Report:
    versions = {"python": python_version(), **{name: installed(name) or "missing" for name in ABOUT}}
    if torch.cuda.is_available():
        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    report = Report(place.rank, socket.gethostname(), torch.cuda.device_count(), versions, port)
    try:
        report.write_s = _write_probe(folder, place.rank)
    except OSError as error:
        report.faults.append(f"cannot write to the shared folder {folder} ({error.strerror})")
    return report


def _write_probe(folder: Path, rank: int) -> float:
    path = _probe(folder, rank)
    begun = time.monotonic()
    with path.open("wb") as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - begun


def _probe(folder: Path, rank: int) -> Path:
    job = os.environ.get("SLURM_JOB_ID", "0")
    return folder / f".health_{job}_{rank}"


# --- the first process's conclusions ------------------------------------------------------------------------------


def _faults_in_reports(place: Place, store: torch.distributed.TCPStore, deadline: float) -> list[str]:
    """The faults that processes report, and processes that do not report."""
    found, faults = {}, []
    for rank in range(place.size):
        try:
            found[rank] = Report(**json.loads(_get(store, f"report/{rank}", deadline)))
        except TimeoutError:
            faults.append(f"{place.named(rank)} has not reported: it did not start, or cannot connect to this node")
    for rank, report in found.items():
        faults += [f"{place.named(rank)}, {report.host}: {fault}" for fault in report.faults]
    speeds = [PROBE_BYTES / 1024**2 / report.write_s for report in found.values() if report.write_s]
    if speeds:
        print(f"nemo-edo: shared folder: {min(speeds):.0f} to {max(speeds):.0f} MB/s per process, concurrently")
    return faults + _differing(place, found)


def _differing(place: Place, found: Mapping[int, Report]) -> list[str]:
    """Processes whose GPUs or versions differ from the majority's."""
    faults = []
    if not found:
        return faults
    measures: dict[str, Callable[[Report], object]] = {"GPUs": lambda report: report.gpus}
    for name in sorted({name for report in found.values() for name in report.versions}):
        measures[name] = lambda report, name=name: report.versions.get(name, "missing")
    for what, measure in measures.items():
        values = {rank: measure(report) for rank, report in found.items()}
        usual, _ = Counter(values.values()).most_common(1)[0]
        faults += [
            f"{place.named(rank)} has {what} {value}, most have {usual}"
            for rank, value in values.items()
            if value != usual
        ]
    return faults


def _faults_in_connections(place: Place, store: torch.distributed.TCPStore, deadline: float) -> list[str]:
    """Failed connections; a process that several neighbours cannot reach is named first."""
    faults, blamed = [], Counter()
    for rank in range(place.size):
        try:
            unreached = json.loads(_get(store, f"reached/{rank}", deadline))
        except TimeoutError:
            faults.append(f"{place.named(rank)} has stopped answering")
            continue
        for other, why in unreached:
            blamed[other] += 1
            faults.append(f"{place.named(rank)} cannot {why} {place.named(other)}")
    worst = [rank for rank, count in blamed.items() if count >= min(2, place.size - 1)]
    return [f"{place.named(rank)} cannot be reached by {blamed[rank]} others" for rank in worst] + faults


# --- between processes --------------------------------------------------------------------------------------------


class _Listener:
    """Sends this process's time to every client, until the end of the block."""

    def __enter__(self) -> _Listener:
        self._socket = socket.create_server(("", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                connection.sendall(str(time.time()).encode())


def _unreached(place: Place, store: torch.distributed.TCPStore, folder: Path) -> list[tuple[int, str]]:
    """(Rank, what fails) for the next ranks, and for the rank at the same place on the next node."""
    steps = {*range(1, NEIGHBOURS + 1), place.local_size}
    others = {(place.rank + step) % place.size for step in steps} - {place.rank}
    failed = []
    for other in sorted(others):
        report = Report(**json.loads(store.get(f"report/{other}")))
        try:
            address = first_that_resolves(place.node_of(other), report.host)
            with socket.create_connection((address, report.port), timeout=5) as connection:
                ahead = float(connection.makefile().read()) - time.time()
        except (OSError, ValueError) as error:  # ValueError: it sent no time
            failed.append((other, f"connect (port {report.port}: {error}) to"))
            continue
        if abs(ahead) > CLOCK_TOLERANCE_S:
            failed.append((other, f"agree on the time ({ahead:+.1f} s) with"))
        try:
            size = _probe(folder, other).stat().st_size
        except OSError:
            size = -1
        if size != PROBE_BYTES:
            failed.append((other, "see in the shared folder what was written by"))
    return failed


def _all_reduce(place: Place, store: torch.distributed.TCPStore, deadline: float) -> list[str]:
    """An all-reduce over all processes, with the backend of the training."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = local_gpu(place.rank % place.local_size) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=max(5.0, deadline - time.monotonic()))
    begun = time.monotonic()
    try:
        torch.distributed.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=limit
        )
        total = torch.full((PROBE_BYTES // 4,), float(place.rank), device=device)
        torch.distributed.all_reduce(total)
        expected, found = place.size * (place.size - 1) / 2, float(total[-1])
    except torch.distributed.DistError as error:
        return [f"{place.named(place.rank)}: {backend} all-reduce failed: {_first_line(error)}"]
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if found != expected:
        return [f"{place.named(place.rank)}: {backend} all-reduce gave {found}, expected {expected}"]
    if place.rank == 0:
        seconds = time.monotonic() - begun
        print(f"nemo-edo: {backend} all-reduce of 32 MiB over {place.size}: {seconds:.2f} s, start-up included")
    return []


def _leave(place: Place, store: torch.distributed.TCPStore) -> None:
    """Keeps the first process, which has the store, until all others have read from it."""
    store.add("left", 1)
    if place.rank == 0:
        until = time.monotonic() + 5
        while store.add("left", 0) < place.size and time.monotonic() < until:
            time.sleep(0.05)


def _get(store: torch.distributed.TCPStore, key: str, deadline: float) -> str:
    """Raises TimeoutError."""
    try:
        store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
    except torch.distributed.DistStoreError as error:
        raise TimeoutError(key) from error
    return store.get(key).decode()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main())
