"""Refit from GPU to GPU: the trainer broadcasts each weight to vLLM's workers (its "nccl" weight transfer).

Megatron-Bridge streams the weights under Hugging Face's names, one at a time, gathered from the ranks that share it; no
process has a second copy of the whole model. The servers' side is vLLM's (``vllm.distributed.weight_transfer``, read at
0.33): the trainer sends them an NCCL unique id, and then the names, types and shapes.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.libnccl import Communicator, Library
from nemo_edo.refit.server_weights import require_weights, reset_prefix_cache
from nemo_edo.utils.http import ServerError
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Worker

Stream = Callable[[Callable[[str, Tensor], None]], None]
"""Calls a function with each of the current weights and its Hugging Face name, in the same order each time."""


STUCK_AFTER_S = 5.0
"""Once a refit has failed, a server that has not answered by then waits in NCCL for a rank that will not come."""

Check = Callable[[], None]
"""Raises ServerError where a server has left the refit; called while others are waited for."""


class NCCLLink:
    """The trainer's end of a process group: it is rank 0, and the servers' workers are the others. Whatever raises a
    ServerError has aborted it."""

    def __init__(
        self, library: Library, device: torch.device, stream: Callable[[], torch.cuda.Stream], limit_s: float
    ) -> None:
        """stream: the current one of the device. limit_s: seconds for the join and for each broadcast."""
        self.unique_id = library.unique_id()
        self._library, self._device, self._stream, self._limit_s = library, device, stream, limit_s
        self._communicator: Communicator | None = None

    def join(self, world_size: int, check: Check) -> None:
        """Returns once all ranks have joined."""
        settings = {"rank": 0, "size": world_size, "stream": self._stream, "check": check, "limit_s": self._limit_s}
        self._communicator = Communicator(self._library, self.unique_id, **settings)
        self._communicator.all_reduce(torch.zeros(1, device=self._device), check)  # as vLLM's workers do first

    def broadcast(self, tensor: Tensor, check: Check) -> None:
        """Sends the tensor to all other ranks."""
        self._communicator.broadcast(tensor.to(self._device).contiguous(), check)

    def abort(self) -> None:
        """Leaves the group without waiting for the others."""
        if self._communicator is not None:
            self._communicator.abort()


class NCCLSync:
    """A WeightSync of vLLM servers with GPUs."""

    def __init__(
        self,
        engine: ServerEngine,
        stream: Stream,
        new_link: Callable[[], NCCLLink],
        *,
        name: str,
        attempts: int,
        limit_s: float,
    ) -> None:
        """name: of the policy, unique; the weights of each version are named after it. attempts: per refit, each with
        a new link. limit_s: seconds that the servers may take for a refit."""
        self._engine = engine
        self._stream = stream
        self._new_link = new_link
        self._name = name
        self._attempts = attempts
        self._limit_s = limit_s
        self._version: int | None = None
        self._described: dict[str, list] | None = None
        self._link: NCCLLink | None = None
        self._linked: list[tuple[str, int]] = []
        """URL and number of starts of each server in the link."""
        engine.on_restart = _refuse_restarted
        engine.on_generated = self._require_current

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where a server has not taken the weights in any attempt."""
        if version == self._version:
            return
        if self._described is None:
            self._described = _describe(self._stream)
        for attempt in range(1, self._attempts + 1):
            error = self._try_to_push(self._label(version))
            if error is None:
                break
            if attempt == self._attempts:
                raise ServerError(f"no refit in {attempt} attempts: {error}")
        self._engine.policy_version = self._version = version

    def release(self) -> None:
        """``WeightSync``. The servers have separate GPUs and keep their weights: NCCL refuses two ranks on one GPU."""

    def _label(self, version: int) -> str:
        return f"{self._name}/{version}"

    def _require_current(self, replica: Replica) -> None:
        require_weights(replica, self._label(self._engine.policy_version))

    # --- one attempt ------------------------------------------------------------------------------------------------

    def _try_to_push(self, label: str) -> str | None:
        """The error, or None. No rank leaves the export early: the others would wait for it."""
        replicas, receiving = self._engine.replicas, []
        with ThreadPoolExecutor(max_workers=max(1, len(replicas))) as pool:
            try:
                self._prepare(replicas, pool)
                receiving = self._receive(replicas, pool)
            except ServerError as failure:
                error = str(failure)
            else:
                error = self._send_all(receiving)
            if error is None:
                try:
                    self._finish(replicas, receiving, label)
                except ServerError as failure:
                    error = str(failure)
            if error is not None:
                self._give_up(replicas, receiving)
        return error

    def _prepare(self, replicas: Sequence[Replica], pool: ThreadPoolExecutor) -> None:
        for replica in replicas:
            if replica.is_managed and not replica.is_healthy():
                replica.restart()
        if self._link is None or self._linked != _starts(replicas):
            self._connect(replicas, pool)
        for replica in replicas:
            replica.request("POST", "/start_weight_update", timeout_s=self._limit_s)

    def _connect(self, replicas: Sequence[Replica], pool: ThreadPoolExecutor) -> None:
        """The workers' requests return once the trainer has joined."""
        if self._link is not None or self._linked:
            for replica in replicas:
                replica.request("POST", "/shutdown_weight_transfer_engine", timeout_s=self._limit_s)
        self._link, self._linked = None, _starts(replicas)
        link, sizes = self._new_link(), [_world_size(replica) for replica in replicas]
        unique_id = base64.b64encode(link.unique_id).decode()
        answers = []
        for place, replica in enumerate(replicas):
            info = {
                "rank_offset": 1 + sum(sizes[:place]),
                "world_size": 1 + sum(sizes),
                "nccl_unique_id_b64": unique_id,
                "packed": False,
            }
            body = {"init_info": info}
            answers.append(pool.submit(_post, replica, "/init_weight_transfer_engine", body, self._limit_s))
        try:
            link.join(1 + sum(sizes), partial(_require_no_failure, answers))
            for answer in answers:
                answer.result()
        except ServerError:
            link.abort()
            self._give_up(replicas, answers)
            raise
        self._link = link

    def _receive(self, replicas: Sequence[Replica], pool: ThreadPoolExecutor) -> list[Future]:
        """Has the workers receive the weights while the trainer sends them."""
        body = {"update_info": self._described}
        return [pool.submit(_post, replica, "/update_weights", body, self._limit_s) for replica in replicas]

    def _send_all(self, receiving: Sequence[Future]) -> str | None:
        """The error, or None. A server that receives no more is noticed while the broadcast waits for it."""
        errors: list[str] = []

        def send(_: str, weight: Tensor) -> None:
            if not errors:
                try:
                    self._link.broadcast(weight, partial(_require_no_failure, receiving))
                except ServerError as failure:
                    errors.append(str(failure))

        self._stream(send)
        return errors[0] if errors else None

    def _give_up(self, replicas: Sequence[Replica], answers: Sequence[Future]) -> None:
        """Leaves the group. The run's own servers that still wait in NCCL, which nothing else ends, are stopped: the
        next attempt restarts them. answers: to what the replicas were last asked; empty: to nothing."""
        if self._link is not None:
            self._link.abort()
        self._link = None
        stuck = wait(answers, STUCK_AFTER_S).not_done
        for place, replica in enumerate(replicas):
            if not answers or answers[place] not in stuck:
                with contextlib.suppress(ServerError):  # where no update is open; an open one would refuse the next
                    replica.request("POST", "/finish_weight_update", timeout_s=self._limit_s)
            elif replica.is_managed:
                replica.stop()

    def _finish(self, replicas: Sequence[Replica], receiving: Sequence[Future], label: str) -> None:
        for answer in receiving:
            answer.result()
        for replica in replicas:
            replica.request("POST", "/finish_weight_update", json={"weight_version": label}, timeout_s=self._limit_s)
            reset_prefix_cache(replica)
            require_weights(replica, label)


def stream(workers: Workers, take: Callable[[str, Tensor], None]) -> None:
    """A ``Stream`` of the workers' model, adapters merged."""
    workers.call(Worker.stream_weights, own=take)


def _describe(stream: Stream) -> dict[str, list]:
    """vLLM's NCCLWeightTransferUpdateInfo: the weights in the order in which they are sent."""
    described: dict[str, list] = {"names": [], "dtype_names": [], "shapes": []}

    def describe(name: str, weight: Tensor) -> None:
        described["names"].append(name)
        described["dtype_names"].append(str(weight.dtype).removeprefix("torch."))
        described["shapes"].append(list(weight.shape))

    stream(describe)
    return described


def _require_no_failure(answers: Sequence[Future]) -> None:
    for answer in answers:
        if answer.done():
            answer.result()


def _post(replica: Replica, path: str, body: dict, limit_s: float) -> None:
    replica.request("POST", path, json=body, timeout_s=limit_s)


def _world_size(replica: Replica) -> int:
    return replica.request("GET", "/get_world_size")["world_size"]


def _starts(replicas: Sequence[Replica]) -> list[tuple[str, int]]:
    return [(replica.url, replica.starts) for replica in replicas]


def _refuse_restarted(replica: Replica) -> None:
    """``ServerEngine.on_restart``: the server has initial weights, and only all ranks together can send others."""
    raise ServerError(f"{replica} was restarted, and lacks weights until the next refit (refit.transport nccl)")
