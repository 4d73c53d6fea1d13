"""What vLLM is told besides its weights: their name, what to forget, and when to sleep. These are its development
endpoints (VLLM_SERVER_DEV_MODE=1): nothing but the run may reach them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_edo.generation.replica import Replica
from nemo_edo.utils.http import ServerError
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Worker

CACHE_RESETS = 20  # attempts: while a request that was given up still holds blocks, the cache stays
CACHE_WAIT_S = 0.25


def reset_prefix_cache(replica: Replica) -> None:
    """Drops keys and values of earlier weights. Raises ServerError where the server keeps some."""
    for _ in range(CACHE_RESETS):
        if replica.request("POST", "/reset_prefix_cache")["success"]:
            return
        time.sleep(CACHE_WAIT_S)
    raise ServerError(f"{replica}: its prefix cache cannot be reset: requests still hold blocks of it")


def name_weights(replica: Replica, name: str) -> None:
    """Names the server's weights, and reads the name back."""
    replica.request("POST", "/update_weight_version", json={"new_version": name})
    require_weights(replica, name)


def name_of_weights(replica: Replica) -> str:
    return replica.request("GET", "/weight_info")["weight_version"]


def require_weights(replica: Replica, name: str) -> None:
    """Raises ServerError unless the server's weights have this name: otherwise it was restarted, or given others."""
    found = name_of_weights(replica)
    if found != name:
        raise ServerError(
            f"{replica} has the weights {found!r} where {name!r} are expected: it was restarted, or something else "
            "has given it weights; its answers are not used"
        )


ENOUGH = 0.5  # share of the servers' memory that must be freed: CUDA graphs and libraries keep the rest


@dataclass(eq=False, repr=False)
class SleepOnTrainersGPUs:
    """Servers on the trainer's GPUs free their memory while it trains: vLLM's sleep mode. Level 2 drops weights and KV
    cache, as the next refit sends other weights. On waking, the weights' memory is allocated and filled first."""

    expected_bytes: int  # memory of a server on all its GPUs
    workers: Workers
    released: Sequence[int] = ()  # bytes that the last sleep has freed on each rank's GPU; empty before the first

    def begin(self, replicas: Sequence[Replica]) -> None:
        """The servers lose their weights. Raises ServerError where their memory is not free afterwards."""
        before = self.workers.call(Worker.free_gpu_memory)[0]
        for replica in replicas:
            replica.request("POST", "/sleep", params={"level": 2})
        after = self.workers.call(Worker.free_gpu_memory)[0]
        self.released = [now - then for now, then in zip(after, before, strict=True)]
        if sum(self.released) < ENOUGH * (expected := len(replicas) * self.expected_bytes):
            raise ServerError(
                f"sleeping servers have freed {sum(self.released) / 2**30:.2f} GiB of GPU memory, but use "
                f"{expected / 2**30:.2f} GiB: the trainer would run out of memory; start servers with "
                "--enable-sleep-mode, lower generation.servers.memory_share, or set generation.placement=apart"
            )

    def make_room(self) -> None:
        """Releases the ranks' cached memory. Raises ServerError where a server could not have what it gave back."""
        free = self.workers.call(Worker.free_gpu_memory)[0]
        for rank, (has, needs) in enumerate(zip(free, self.released or [0] * len(free), strict=True)):
            if has < needs:
                raise ServerError(
                    f"the GPU of rank {rank} has {has / 2**30:.2f} GiB free, and the server that sleeps there needs "
                    f"{needs / 2**30:.2f} GiB again: the trainer's weights, gradients and optimizer states leave no "
                    f"more. Lower generation.servers.memory_share by the missing {(needs - has) / 2**30:.2f} GiB's "
                    "share of the GPU, split the model over more GPUs, or set generation.placement=apart"
                )

    def wake(self, replica: Replica, memory: str) -> None:
        """memory: "weights" before the weights are sent, "kv_cache" after."""
        replica.request("POST", "/wake_up", params={"tags": memory})
