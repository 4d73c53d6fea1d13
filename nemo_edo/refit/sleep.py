"""Servers on the trainer's GPUs give their memory back while it trains: vLLM's sleep mode.

They sleep at level 2: weights and cache are dropped, as the next refit brings others anyhow. Then the memory of the
weights is taken again, and filled, and that of the cache taken after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from nemo_edo.generation.replica import Replica
from nemo_edo.http_client import ServerError
from nemo_edo.parallel.main_rank import on_main

LEVEL = 2
ENOUGH = 0.5
"""Of what the servers were given, what they have to give back: the rest is graphs and libraries, which stay."""


class Sleep(Protocol):
    """What servers do while they are not needed. All ranks call ``begin``; the first alone wakes replicas."""

    def begin(self, replicas: Sequence[Replica]) -> bool:
        """Whether they have lost their weights by it."""

    def wake_for_weights(self, replica: Replica) -> None:
        """Before it is given weights."""

    def wake_for_requests(self, replica: Replica) -> None:
        """After that."""


class Awake:
    """Servers with GPUs of their own."""

    def begin(self, replicas: Sequence[Replica]) -> bool:
        return False

    def wake_for_weights(self, replica: Replica) -> None:
        pass

    def wake_for_requests(self, replica: Replica) -> None:
        pass


class OnTrainersGPUs:
    """Servers that sleep while the trainer needs their GPUs."""

    def __init__(self, expected_bytes: int, free_memory: Callable[[], int]) -> None:
        """expected_bytes: what the servers were given, over all GPUs. free_memory: bytes, over the GPUs of all ranks;
        all ranks call it."""
        self._expected = expected_bytes
        self._free_memory = free_memory

    def begin(self, replicas: Sequence[Replica]) -> bool:
        """Raises ServerError where a server does not sleep, or the memory is not free afterwards."""
        before = self._free_memory()
        on_main(lambda: [_put_to_sleep(replica) for replica in replicas] and None)
        released = self._free_memory() - before
        if released < ENOUGH * self._expected:
            raise ServerError(
                f"servers asleep have given back {released / 2**30:.2f} GiB of GPU memory, of "
                f"{self._expected / 2**30:.2f} GiB that they were given: the trainer would run out of it; lower "
                "generation.servers.memory_share, or set generation.placement=apart"
            )
        return True

    def wake_for_weights(self, replica: Replica) -> None:
        _wake(replica, "weights")

    def wake_for_requests(self, replica: Replica) -> None:
        _wake(replica, "kv_cache")
        if replica.request("GET", "/is_sleeping")["is_sleeping"]:
            raise ServerError(f"{replica} still sleeps after it was woken")


def free_gpu_memory() -> int:
    """Bytes, over the GPUs of all ranks, that no process holds; this process's own unused memory is given back first.
    All ranks call it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.tensor([torch.cuda.mem_get_info()[0]], device="cuda")
    torch.distributed.all_reduce(free)
    return int(free.item())


def _put_to_sleep(replica: Replica) -> None:
    replica.request("POST", "/sleep", params={"level": LEVEL})
    if not replica.request("GET", "/is_sleeping")["is_sleeping"]:
        raise ServerError(f"{replica} does not sleep: it was started without --enable-sleep-mode, or on a CPU")


def _wake(replica: Replica, tag: str) -> None:
    replica.request("POST", "/wake_up", params={"tags": tag})
