"""Refit from GPU to GPU: the trainer broadcasts its weights in buckets to vLLM's workers (its "nccl" weight transfer).

Megatron-Bridge streams the weights under Hugging Face's names, one at a time, gathered from the ranks that share it;
the first rank packs them into buckets. No process has a second copy of the whole model, and no host any of it. The
servers' side is vLLM's (``vllm.distributed.weight_transfer``, read at 0.33): the trainer sends them an NCCL unique id
and the size of a bucket, and then the names, types and shapes."""

import base64
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.libnccl import Communicator
from nemo_edo.refit.servers import require_weights, reset_prefix_cache
from nemo_edo.utils.http import ServerError
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Worker

logger = logging.getLogger(__name__)
STUCK_AFTER_S = 5.0
"""Once a refit has failed, a server that has not answered by then waits in NCCL for a rank that will not come."""


@dataclass(eq=False, repr=False)
class NCCLSync:
    """A WeightSync of vLLM servers with GPUs. The trainer is rank 0 of a group, and the servers' workers are the
    others; they keep it until one of them is restarted."""

    engine: ServerEngine
    workers: Workers
    new_group: Callable[[], Communicator]
    _: KW_ONLY
    name: str  # of the policy, unique; the weights of each version are named after it
    attempts: int  # per refit, each after a failure with a new group
    limit_s: float  # seconds that the servers may take for a refit
    bucket_bytes: int  # a bucket ends with the weight that exceeds it

    def __post_init__(self) -> None:
        self._sizes: list[int] = []  # bytes of each weight
        self._version: int | None = None
        self._described: dict[str, list] | None = None
        """vLLM's NCCLWeightTransferUpdateInfo: the weights in the order in which they are sent."""
        self._group: Communicator | None = None
        self._members: list[tuple[str, int]] = []  # URL and number of starts of each server in the group
        if isinstance(self.engine.weights, NCCLSync):
            self.engine.weights.leave()
        self.engine.weights = self

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where a server has not taken the weights in any attempt."""
        if version == self._version:
            return
        if self._described is None:
            described: dict[str, list] = {"names": [], "dtype_names": [], "shapes": []}
            sizes = []

            def describe(name: str, weight: Tensor) -> None:
                described["names"].append(name)
                described["dtype_names"].append(str(weight.dtype).removeprefix("torch."))
                described["shapes"].append(list(weight.shape))
                sizes.append(weight.nbytes)

            self.workers.call(Worker.stream_weights, own=describe)
            self._described, self._sizes = described, sizes
        begin = time.monotonic()
        for attempt in range(1, self.attempts + 1):
            try:
                with ThreadPoolExecutor(max_workers=len(self.engine.replicas)) as pool:
                    buckets = self._try_to_push(f"{self.name}/{version}", pool)
                break
            except ServerError as error:
                if attempt == self.attempts:
                    raise ServerError(f"no refit in {attempt} attempts: {error}") from error
        logger.info(
            "refit %d: %.2f GB in %d buckets to %d servers in %.1f s",
            version, sum(self._sizes) / 1e9, buckets, len(self.engine.replicas), time.monotonic() - begin,
        )  # fmt: skip
        self.engine.policy_version = self._version = version

    def release(self) -> None:
        """``WeightSync``. The servers have separate GPUs and keep their weights: NCCL refuses two ranks on one GPU."""

    def restore(self, replica: Replica) -> None:
        """``ServedWeights``: a server that has lost the weights waits for a refit: only all ranks can send them."""
        self.require(replica)

    def require(self, replica: Replica) -> None:
        """``ServedWeights``."""
        require_weights(replica, f"{self.name}/{self.engine.policy_version}")

    def leave(self) -> None:
        """Leaves the group: another policy takes its place, or a new group does."""
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _try_to_push(self, label: str, pool: ThreadPoolExecutor) -> int:
        """Returns how many buckets. After an error no server of the run has an update open or waits in NCCL."""
        replicas, limit_s = self.engine.replicas, self.limit_s
        answers: list[Future] = []  # pending, to the last call; the trainer continues meanwhile

        def ask(path: str, bodies: Sequence[dict]) -> None:
            pairs = zip(replicas, bodies, strict=True)
            answers[:] = [pool.submit(one.request, "POST", path, json=body, timeout_s=limit_s) for one, body in pairs]

        def raise_failures() -> None:
            """Called while the trainer waits in NCCL: a server may have left."""
            for answer in answers:
                if answer.done():
                    answer.result()

        try:
            for replica in replicas:
                if replica.is_managed and not replica.is_healthy():
                    replica.restart()
            members = [(replica.url, replica.starts) for replica in replicas]
            if self._group is None or self._members != members:
                self.leave()
                for replica in replicas:  # which may be in an earlier policy's group
                    replica.request("POST", "/shutdown_weight_transfer_engine", timeout_s=limit_s)
                self._members = members
                self._group = group = self.new_group()
                sizes = [replica.request("GET", "/get_world_size")["world_size"] for replica in replicas]
                common = {
                    "world_size": 1 + sum(sizes),
                    "nccl_unique_id_b64": base64.b64encode(group.unique_id).decode(),
                    "packed": True,
                    "packed_buffer_size_bytes": self.bucket_bytes,
                }
                offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
                infos = [{"init_info": {"rank_offset": offset, **common}} for offset in offsets]
                ask("/init_weight_transfer_engine", infos)  # the workers answer once the trainer has joined
                group.join(0, 1 + sum(sizes), raise_failures)
                wait(answers)
                raise_failures()
            for replica in replicas:
                replica.request("POST", "/start_weight_update", timeout_s=limit_s)
            ask("/update_weights", [{"update_info": self._described}] * len(replicas))
            buckets = self._broadcast_all(raise_failures)
            wait(answers)
            raise_failures()
            for replica in replicas:
                body = {"weight_version": label}
                replica.request("POST", "/finish_weight_update", json=body, timeout_s=limit_s)
                reset_prefix_cache(replica)
                require_weights(replica, label)
            return buckets
        except BaseException:  # the servers would wait in NCCL for what the trainer does not send
            self._give_up(replicas, answers)
            raise

    def _broadcast_all(self, raise_failures: Callable[[], None]) -> int:
        """Sends the current weights; returns the number of buckets. vLLM's workers cut what arrives by the same rule
        (``packed_nccl_broadcast_consumer``): a bucket ends with the weight that exceeds ``bucket_bytes``. All share the
        memory of one. No rank leaves the export early: the others would wait for it."""
        errors: list[ServerError] = []
        memory: Tensor | None = None
        buckets = filled = 0

        def send_bucket() -> None:
            nonlocal buckets, filled
            try:
                self._group.broadcast(memory[:filled], raise_failures)
            except ServerError as error:
                errors.append(error)
            buckets, filled = buckets + 1, 0

        def pack(_: str, weight: Tensor) -> None:
            nonlocal memory, filled
            if errors:
                return
            if memory is None:
                most = min(sum(self._sizes), self.bucket_bytes + max(self._sizes))
                memory = torch.empty(most, dtype=torch.uint8, device=weight.device)
            begin, filled = filled, filled + weight.nbytes
            memory[begin:filled] = weight.contiguous().view(-1).view(torch.uint8)
            if filled > self.bucket_bytes:
                send_bucket()

        self.workers.call(Worker.stream_weights, own=pack)
        if filled and not errors:
            send_bucket()
        if errors:
            raise errors[0]
        return buckets

    def _give_up(self, replicas: Sequence[Replica], answers: Sequence[Future]) -> None:
        """Leaves the group. The run's servers that still wait in NCCL are stopped; the next attempt restarts them."""
        self.leave()
        stuck = wait(answers, STUCK_AFTER_S).not_done
        for place, replica in enumerate(replicas):
            if not answers or answers[place] not in stuck:
                with contextlib.suppress(ServerError):  # where no update is open; an open one would refuse the next
                    replica.request("POST", "/finish_weight_update", timeout_s=self.limit_s)
            elif replica.is_managed:
                replica.stop()
