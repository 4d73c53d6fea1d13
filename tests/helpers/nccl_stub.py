"""The stub of NCCL (stub_nccl.c), and servers whose workers receive weights through it."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nemo_edo.refit.libnccl import Communicator, Library
from nemo_edo.refit.nccl import NCCLLink
from nemo_edo.utils.http import ServerError

SOURCE = Path(__file__).with_suffix(".c").with_name("stub_nccl.c")


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
        """Tensors that it receives before it comes no more, once; below 0: it does not die."""

    def join_as_server(self, unique_id: bytes, ranks: range, world_size: int) -> None:
        self.is_stopped = False
        self._ranks = self._all([lambda rank=rank: self._join(unique_id, rank, world_size) for rank in ranks])

    def _join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        stream, limit_s = Stream(self._library, 1 + rank), self._limit_s
        joined = Communicator(self._library, unique_id, rank=rank, size=size, stream=lambda: stream,
                              check=self._require_running, limit_s=limit_s)  # fmt: skip
        joined.all_reduce(total := torch.ones(1), self._require_running)
        assert float(total) == size - 1  # the trainer adds 0
        return joined

    def receive(self, server, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        self.dies_after -= 1
        if self.dies_after == -1:
            raise ConnectionError("the worker has died")
        tensors = [torch.full(shape, 7).to(dtype) for _ in self._ranks]
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


def link(library: Library, limit_s: float) -> NCCLLink:
    """The trainer's end, on its own stream."""
    stream = Stream(library, 1)
    return NCCLLink(library, torch.device("cpu"), lambda: stream, limit_s)
