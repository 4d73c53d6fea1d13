"""What a server is told about its weights: which to load, what they are called, and what to forget.

vLLM's are its development endpoints (VLLM_SERVER_DEV_MODE=1): nothing but the run may reach them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from nemo_edo.generation.replica import Replica
from nemo_edo.http_client import ServerError

CACHE_RESETS = 20
"""Attempts: while a request that was given up still holds blocks, the cache stays."""
CACHE_WAIT_S = 0.25


class StaleWeights(ServerError):
    """A server answers with other weights than the run has brought it to."""


class ServerWeights(Protocol):
    """How a kind of server takes the weights of a folder. All methods raise ServerError."""

    def load(self, replica: Replica, folder: Path) -> None:
        """Afterwards it answers with the folder's weights, and with nothing kept of earlier ones."""

    def started(self, replica: Replica, folder: Path) -> None:
        """What is left to do of ``load`` for a server that was started with ``starts_with(folder)``."""

    def require(self, replica: Replica, folder: Path) -> None:
        """Raises StaleWeights where the server has others, as far as it can tell."""

    def starts_with(self, folder: Path) -> Path:
        """The model folder that a server is to be started with."""

    def served_model(self, replica: Replica, folder: Path) -> str:
        """The name that requests give."""


class ReloadedWeights:
    """vLLM's, which loads them in place; their name is the folder's path."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: seconds that a server may take to load them."""
        self._limit_s = limit_s

    def load(self, replica: Replica, folder: Path) -> None:
        self._reload(replica, folder)
        forget_prefixes(replica)
        name_weights(replica, str(folder))

    def _reload(self, replica: Replica, folder: Path) -> None:
        # Our own servers renew a tied output layer, too (generation/inside_server/tied_head.py).
        method = "reload_policy" if replica.is_ours else "reload_weights"
        body = {"method": method, "kwargs": {"weights_path": str(folder)}}
        replica.request("POST", "/collective_rpc", json=body, timeout_s=self._limit_s)

    def started(self, replica: Replica, folder: Path) -> None:
        name_weights(replica, str(folder))

    def require(self, replica: Replica, folder: Path) -> None:
        require_weights(replica, str(folder))

    def starts_with(self, folder: Path) -> Path:
        return folder

    def served_model(self, replica: Replica, folder: Path) -> str:
        return replica.model_name


class AdapterWeights(ReloadedWeights):
    """vLLM's, with the model's weights loaded once and an adapter beside them that changes: the folders are PEFT's."""

    def __init__(self, base: Path, limit_s: float) -> None:
        """base: the folder of the weights that adapters add to."""
        super().__init__(limit_s)
        self._base = base

    def load(self, replica: Replica, folder: Path) -> None:
        found = _told(replica.request("GET", "/weight_info"), "weight_version", replica)
        if Path(str(found)).parent != self._base.parent:  # another policy's
            self._reload(replica, self._base)
        self.started(replica, folder)
        forget_prefixes(replica)

    def started(self, replica: Replica, folder: Path) -> None:
        body = {"lora_name": self.served_model(replica, folder), "lora_path": str(folder)}
        for name in _models(replica):
            if name != replica.model_name:
                replica.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, answers_json=False)
        replica.request("POST", "/v1/load_lora_adapter", json=body, timeout_s=self._limit_s, answers_json=False)
        name_weights(replica, str(folder))

    def starts_with(self, folder: Path) -> Path:
        return self._base

    def served_model(self, replica: Replica, folder: Path) -> str:
        return f"{folder.parent.name}_{folder.name}"


class RelaunchedWeights:
    """Those of a server that takes weights when it starts, and only then: TensorRT-LLM's."""

    def load(self, replica: Replica, folder: Path) -> None:
        replica.restart(folder)

    def started(self, replica: Replica, folder: Path) -> None:
        """They have no name."""

    def require(self, replica: Replica, folder: Path) -> None:
        """The server was started with them, and cannot change them."""

    def starts_with(self, folder: Path) -> Path:
        return folder

    def served_model(self, replica: Replica, folder: Path) -> str:
        return replica.model_name  # after the folder


def forget_prefixes(replica: Replica) -> None:
    """Keys and values of other weights are not used again. Raises ServerError where the server keeps some."""
    for attempt in range(CACHE_RESETS):
        if _told(replica.request("POST", "/reset_prefix_cache"), "success", replica):
            return
        if attempt + 1 < CACHE_RESETS:
            time.sleep(CACHE_WAIT_S)
    raise ServerError(f"{replica}: its prefix cache cannot be reset: requests still hold blocks of it")


def name_weights(replica: Replica, name: str) -> None:
    """Tells the server what its weights are called, and reads it back."""
    replica.request("POST", "/update_weight_version", json={"new_version": name})
    require_weights(replica, name)


def require_weights(replica: Replica, name: str) -> None:
    """Raises StaleWeights unless the server's weights are called so: else it was started again, or given others."""
    found = _told(replica.request("GET", "/weight_info"), "weight_version", replica)
    if found != name:
        raise StaleWeights(
            f"{replica} has the weights {found!r} where {name!r} are expected: it was started again, or something else "
            "has given it weights; what it answered is not used"
        )


def _models(replica: Replica) -> list[str]:
    """The model and the adapters that the server has."""
    return [model["id"] for model in _told(replica.request("GET", "/v1/models"), "data", replica)]


def _told(answer: object, key: str, replica: Replica) -> object:
    if not isinstance(answer, dict) or key not in answer:
        raise ServerError(f"{replica}: an answer without {key}: {answer!r}")
    return answer[key]
