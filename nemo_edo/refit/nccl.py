"""Refit from GPU to GPU: the trainer broadcasts each weight to vLLM's workers (its "nccl" weight transfer).

Megatron-Bridge streams the weights under Hugging Face's names, one at a time, gathered from the ranks that share it; no
process has a second copy of the whole model. The servers' side is vLLM's (``vllm.distributed.weight_transfer``, read at
0.32): the trainer sends them an NCCL unique id, and then the names, types and shapes.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.megatron.bridge import BuiltModel
from nemo_edo.parallel.main_rank import is_main, on_main_for_long
from nemo_edo.refit.server_weights import require_weights, reset_prefix_cache
from nemo_edo.utils.http import ServerError

Export = Callable[[], Iterator[tuple[str, Tensor]]]
"""The current weights under Hugging Face's names, in the same order each time. All ranks iterate it together."""


REFUSED_WITHIN_S = 1.0
"""A server that cannot join answers within this time; one that joins waits for the trainer."""


class Link(Protocol):
    """The trainer's end of a process group: it is rank 0, and the servers' workers are the others."""

    unique_id: bytes

    def join(self, world_size: int) -> None:
        """Returns once all ranks have joined."""

    def broadcast(self, tensor: Tensor) -> None:
        """Sends the tensor to all other ranks."""


class NCCLLink:
    """A Link by torch's bindings of NCCL."""

    def __init__(self) -> None:
        self.unique_id: bytes = torch.cuda.nccl.unique_id()
        self._communicator: Any = None

    def join(self, world_size: int) -> None:
        self._communicator = torch.cuda.nccl.init_rank(world_size, self.unique_id, 0)
        # As vLLM's workers do first.
        torch.cuda.nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[self._communicator])
        torch.cuda.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        torch.cuda.nccl.broadcast([tensor.to("cuda").contiguous()], comms=[self._communicator])
        torch.cuda.synchronize()


class NCCLSync:
    """A WeightSync of vLLM servers with GPUs."""

    def __init__(
        self,
        engine: ServerEngine,
        export: Export,
        new_link: Callable[[], Link],
        *,
        name: str,
        attempts: int,
        limit_s: float,
    ) -> None:
        """name: of the policy, unique; the weights of each version are named after it. attempts: per refit, each with
        a new link. limit_s: seconds that the servers may take for a refit."""
        self._engine = engine
        self._export = export
        self._new_link = new_link
        self._name = name
        self._attempts = attempts
        self._limit_s = limit_s
        self._version: int | None = None
        self._described: dict[str, list] | None = None
        self._link: Link | None = None
        self._linked: list[tuple[str, int]] = []
        """URL and number of starts of each server in the link."""
        engine.on_restart = _refuse_restarted
        engine.on_generated = self._require_current

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where a server has not taken the weights in any attempt."""
        if version == self._version:
            return
        if self._described is None:
            self._described = _describe(self._export())
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
        """The error, on all ranks, or None. No rank leaves the export early: the others would wait for it."""
        replicas, error, receiving = self._engine.replicas, None, []
        with ThreadPoolExecutor(max_workers=max(1, len(replicas))) as pool:
            try:
                on_main_for_long(lambda: self._prepare(replicas, pool))
                if is_main():
                    receiving = self._receive(replicas, pool)
            except ServerError as failure:
                error = str(failure)
            for _, tensor in self._export() if error is None else ():
                if is_main() and error is None:
                    error = self._send(tensor, receiving)
            try:
                on_main_for_long(lambda: self._finish(replicas, receiving, error, label))
            except ServerError as failure:
                self._link = None
                error = str(failure)
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
        for answer in wait(answers, REFUSED_WITHIN_S).done:
            answer.result()
        link.join(1 + sum(sizes))
        for answer in answers:
            answer.result()
        self._link = link

    def _receive(self, replicas: Sequence[Replica], pool: ThreadPoolExecutor) -> list[Future]:
        """Has the workers receive the weights while the trainer sends them."""
        body = {"update_info": self._described}
        return [pool.submit(_post, replica, "/update_weights", body, self._limit_s) for replica in replicas]

    def _send(self, tensor: Tensor, receiving: Sequence[Future]) -> str | None:
        for answer in receiving:
            if answer.done() and answer.exception() is not None:  # it receives no more, so that a broadcast would hang
                return str(answer.exception())
        self._link.broadcast(tensor)
        return None

    def _finish(self, replicas: Sequence[Replica], receiving: Sequence[Future], error: str | None, label: str) -> None:
        if error is not None:
            raise ServerError(error)
        for answer in receiving:
            answer.result()
        for replica in replicas:
            replica.request("POST", "/finish_weight_update", json={"weight_version": label}, timeout_s=self._limit_s)
            reset_prefix_cache(replica)
            require_weights(replica, label)


def exported(model: BuiltModel) -> Export:
    """Megatron-Bridge's streaming export, adapters merged."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        with contextlib.redirect_stdout(io.StringIO()):  # Bridge prints its progress
            yield from model.bridge.export_hf_weights(model.chunks, cpu=False, show_progress=False)

    return weights


def _describe(weights: Iterator[tuple[str, Tensor]]) -> dict[str, list]:
    """vLLM's NCCLWeightTransferUpdateInfo: the weights in the order in which they are sent."""
    described: dict[str, list] = {"names": [], "dtype_names": [], "shapes": []}
    for name, tensor in weights:
        described["names"].append(name)
        described["dtype_names"].append(str(tensor.dtype).removeprefix("torch."))
        described["shapes"].append(list(tensor.shape))
    return described


def _post(replica: Replica, path: str, body: dict, limit_s: float) -> None:
    replica.request("POST", path, json=body, timeout_s=limit_s)


def _world_size(replica: Replica) -> int:
    return replica.request("GET", "/get_world_size")["world_size"]


def _starts(replicas: Sequence[Replica]) -> list[tuple[str, int]]:
    return [(replica.url, replica.starts) for replica in replicas]


def _refuse_restarted(replica: Replica) -> None:
    """``ServerEngine.on_restart``: the server has initial weights, and only all ranks together can send others."""
    raise ServerError(f"{replica} was restarted, and lacks weights until the next refit (refit.transport nccl)")
