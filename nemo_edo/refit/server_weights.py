"""What a server is told about its weights: which to load, what they are called, and what to forget.

vLLM's are its development endpoints (VLLM_SERVER_DEV_MODE=1): nothing but the run may reach them.
"""

from __future__ import annotations

import time
from pathlib import Path

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import MODELS
from nemo_edo.utils.http import ServerError

CACHE_RESETS = 20
"""Attempts: while a request that was given up still holds blocks, the cache stays."""
CACHE_WAIT_S = 0.25


class StaleWeights(ServerError):
    """A server has other weights than the run has given it."""


class RelaunchedWeights:
    """How a kind of server loads the weights of a folder; this one is for TensorRT-LLM, which loads weights only when
    it starts. All methods raise ServerError."""

    def load(self, replica: Replica, folder: Path) -> None:
        """Afterwards the server uses the folder's weights, and nothing cached from earlier ones."""
        replica.restart(folder)

    def after_restart(self, replica: Replica, folder: Path) -> None:
        """The rest of ``load`` for a server that was started with ``restart_folder(folder)``."""

    def require(self, replica: Replica, folder: Path) -> None:
        """Raises StaleWeights where the server is known to have others."""

    def restart_folder(self, folder: Path) -> Path:
        """The model folder for the start of a server."""
        return folder

    def served_model(self, replica: Replica, folder: Path) -> str:
        """The model that requests name."""
        return replica.model_name


class ReloadedWeights(RelaunchedWeights):
    """For vLLM, which reloads weights in place; their name is the folder's path."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: seconds that a server may take to load weights."""
        self._limit_s = limit_s

    def load(self, replica: Replica, folder: Path) -> None:
        self._reload(replica, folder)
        reset_prefix_cache(replica)
        set_weights_name(replica, str(folder))

    def _reload(self, replica: Replica, folder: Path) -> None:
        # The worker extension renews a tied output layer, too (generation/inside_server/tied_head.py).
        method = "reload_policy" if replica.has_worker_extension else "reload_weights"
        body = {"method": method, "kwargs": {"weights_path": str(folder)}}
        replica.request("POST", "/collective_rpc", json=body, timeout_s=self._limit_s)

    def after_restart(self, replica: Replica, folder: Path) -> None:
        set_weights_name(replica, str(folder))

    def require(self, replica: Replica, folder: Path) -> None:
        require_weights(replica, str(folder))


class AdapterWeights(ReloadedWeights):
    """For vLLM with LoRA: the base weights are loaded once, and each folder is a PEFT adapter."""

    def __init__(self, base: Path, limit_s: float) -> None:
        """base: the folder of the base weights."""
        super().__init__(limit_s)
        self._base = base

    def load(self, replica: Replica, folder: Path) -> None:
        found = replica.request("GET", "/weight_info")["weight_version"]
        if Path(str(found)).parent != self._base.parent:  # another policy's
            self._reload(replica, self._base)
        self.after_restart(replica, folder)
        reset_prefix_cache(replica)

    def after_restart(self, replica: Replica, folder: Path) -> None:
        body = {"lora_name": self.served_model(replica, folder), "lora_path": str(folder)}
        for model in replica.request("GET", MODELS)["data"]:
            if (name := model["id"]) != replica.model_name:
                replica.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, answers_json=False)
        replica.request("POST", "/v1/load_lora_adapter", json=body, timeout_s=self._limit_s, answers_json=False)
        set_weights_name(replica, str(folder))

    def restart_folder(self, folder: Path) -> Path:
        return self._base

    def served_model(self, replica: Replica, folder: Path) -> str:
        return f"{folder.parent.name}_{folder.name}"


def reset_prefix_cache(replica: Replica) -> None:
    """Drops keys and values of earlier weights. Raises ServerError where the server keeps some."""
    for attempt in range(CACHE_RESETS):
        if replica.request("POST", "/reset_prefix_cache")["success"]:
            return
        if attempt + 1 < CACHE_RESETS:
            time.sleep(CACHE_WAIT_S)
    raise ServerError(f"{replica}: its prefix cache cannot be reset: requests still hold blocks of it")


def set_weights_name(replica: Replica, name: str) -> None:
    """Names the server's weights, and reads the name back."""
    replica.request("POST", "/update_weight_version", json={"new_version": name})
    require_weights(replica, name)


def require_weights(replica: Replica, name: str) -> None:
    """Raises StaleWeights unless the server's weights have this name: otherwise it was restarted, or given others."""
    found = replica.request("GET", "/weight_info")["weight_version"]
    if found != name:
        raise StaleWeights(
            f"{replica} has the weights {found!r} where {name!r} are expected: it was restarted, or something else "
            "has given it weights; its answers are not used"
        )
