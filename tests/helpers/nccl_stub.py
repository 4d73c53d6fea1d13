"""The stub of NCCL (stub_nccl.c), and servers whose workers receive weights through it."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nemo_edo.refit.libnccl import Communicator, Library
from nemo_edo.utils.http import ServerError

SOURCE = Path(__file__).with_name("stub_nccl.c")
CPU = torch.device("cpu")


def build(folder: Path, version: int = 22907) -> Path:
    """Compiles the stub."""
    library = folder / "libnccl.so.2"
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([*command, f"-DDEFAULT_VERSION={version}", "-o", str(library), str(SOURCE)], check=True)
    return library


class Stream:
    """One of the stub's streams, which are numbers from 1 to 63."""

    def __init__(self, library: Library, number: int) -> None:
        self.cuda_stream = number
        self._library = library

    def query(self) -> bool:
        return bool(self._library.stub_stream_idle(self.cuda_stream))


class Workers:
    """What a ``ScriptedReplica`` receives with: communicators of its ranks, each with its own stream."""

    def __init__(self, library: Library, limit_s: float) -> None:
        self._library, self._limit_s = library, limit_s
        self._ranks: list[Communicator] = []
        self.is_stopped = False
        self.dies_after = -1
        """Buckets that it receives before it comes no more, once; below 0: it does not die."""

    def join(self, unique_id: bytes, ranks: range, world_size: int) -> None:
        self.is_stopped = False
        self._ranks = [communicator(self._library, self._limit_s, rank, unique_id) for rank in ranks]
        pairs = zip(self._ranks, ranks, strict=True)
        self._all([lambda one=one, rank=rank: one.join(rank, world_size, self._require_running) for one, rank in pairs])

    def receive(self, num_bytes: int) -> torch.Tensor:
        self.dies_after -= 1
        if self.dies_after == -1:
            raise ConnectionError("the worker has died")
        tensors = [torch.full((num_bytes,), 7, dtype=torch.uint8) for _ in self._ranks]
        pairs = zip(self._ranks, tensors, strict=True)
        running = self._require_running
        self._all([lambda rank=rank, tensor=tensor: rank.broadcast(tensor, running) for rank, tensor in pairs])
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
        return tensors[0]

    def _require_running(self) -> None:
        if self.is_stopped:
            raise ServerError("the server was stopped")

    @staticmethod
    def _all(calls: list) -> list:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]


def communicator(library: Library, limit_s: float, rank: int = 0, unique_id: bytes | None = None) -> Communicator:
    """The trainer's end or a worker's, on its own stream."""
    stream = Stream(library, 1 + rank)
    return Communicator(library, limit_s, CPU, lambda: stream, unique_id)
