"""A scripted replica with the endpoints of vLLM 0.32 that a refit uses, without vLLM."""

import base64
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers import nccl_stub

from nemo_edo.utils.http import ServerError


@dataclass
class ScriptedReplica:
    """Answers as vLLM 0.32, and records its requests in order."""

    name: str = "server 0"
    is_managed: bool = True
    faults: dict[str, int] = field(default_factory=dict)
    """By path: how many requests fail before the first success. /weight_info then returns another version, and
    /reset_prefix_cache does not reset."""
    workers: int = 1
    asleep: bool = False
    cannot_start: bool = False
    starts: int = 1
    url: str = "http://127.0.0.1:1"
    model_name: str = "policy"
    weights: str | None = None
    """The folder that is loaded."""
    version: str = "default"
    adapters: dict[str, str] = field(default_factory=dict)
    """Their folders by name."""
    asked: list[tuple] = field(default_factory=list)
    link: nccl_stub.Workers | None = None
    """What its workers receive weights with."""
    model_folder: Path | None = None
    received: list[tuple] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    """Bytes of each that arrived."""
    is_updating: bool = False
    is_running: bool = True

    @property
    def has_ended(self) -> bool:
        return not self.is_running

    @property
    def has_worker_extension(self) -> bool:
        return self.is_managed

    def __str__(self) -> str:
        return self.name

    def is_healthy(self) -> bool:
        return self.is_running

    def stop(self) -> None:
        self.is_running = False
        if self.link is not None:
            self.link.is_stopped = True

    def request(self, method: str, path: str, json=None, params=None, timeout_s=60.0, answers_json=True):
        self.asked.append((method, path, json, params))
        fails = self.faults.get(path, 0) > 0
        if fails:
            self.faults[path] -= 1
            self.is_updating &= path != "/update_weights"  # an update that breaks ends it, as in vLLM's workers
            if path not in ("/reset_prefix_cache", "/weight_info"):
                raise ServerError(f"{self.name}: {method} {path}: status 500")
        return getattr(self, path.strip("/").replace("/", "_"))(json, params, fails)

    def restart(self, model_folder: Path | None = None) -> None:
        self.model_folder = model_folder or self.model_folder
        self.asked.append(("restart", str(self.model_folder), None, None))
        if self.cannot_start:
            raise ServerError(f"{self.name} has ended with status 1")
        self.starts += 1
        self.is_updating, self.is_running = False, True
        self.weights, self.version, self.adapters = str(self.model_folder), "default", {}

    # --- the endpoints ----------------------------------------------------------------------------------------------

    def collective_rpc(self, json, params, fails):
        assert json["method"] == ("reload_policy" if self.has_worker_extension else "reload_weights")
        assert json["kwargs"].keys() == {"weights_path"}
        assert not self.asleep and any(Path(json["kwargs"]["weights_path"]).glob("*.safetensors"))
        self.weights = json["kwargs"]["weights_path"]
        return {"results": [None]}

    def reset_prefix_cache(self, json, params, fails):
        return {"success": not fails}

    def update_weight_version(self, json, params, fails):
        self.version = json["new_version"]
        return {"success": True, "new_version": self.version}

    def weight_info(self, json, params, fails):
        return {"weight_version": "another" if fails else self.version}

    def sleep(self, json, params, fails):
        self.asleep = True
        return {"status": "sleeping", "level": params["level"]}

    def wake_up(self, json, params, fails):
        self.asleep = self.asleep and params["tags"] == "kv_cache"  # awake enough to take weights
        return {"status": "awake", "tags": [params["tags"]]}

    def get_world_size(self, json, params, fails):
        return {"world_size": self.workers}

    def init_weight_transfer_engine(self, json, params, fails):
        """Waits, as a worker does, until the trainer has joined."""
        info = json["init_info"]
        assert info["packed"]
        self.bucket_bytes = info["packed_buffer_size_bytes"]
        ranks = range(info["rank_offset"], info["rank_offset"] + self.workers)
        self.link.join(base64.b64decode(info["nccl_unique_id_b64"]), ranks, info["world_size"])
        return {"message": "Weight transfer initialized"}

    def shutdown_weight_transfer_engine(self, json, params, fails):
        return {"message": "Weight transfer shut down"}

    def start_weight_update(self, json, params, fails):
        if self.is_updating:  # as vLLM's workers
            raise ServerError(f"{self.name}: start_weight_update called while a weight update is already active")
        self.received, self.buckets, self.is_updating = [], [], True
        return {"message": "Weight update started"}

    def update_weights(self, json, params, fails):
        """Receives the tensors whose names, types and shapes are in the request, in buckets."""
        info = json["update_info"]
        assert info.keys() == {"names", "dtype_names", "shapes"}
        waiting: list[tuple] = []
        for place, (name, dtype, shape) in enumerate(
            zip(info["names"], info["dtype_names"], info["shapes"], strict=True), start=1
        ):
            waiting.append((name, getattr(torch, dtype), shape, math.prod(shape) * getattr(torch, dtype).itemsize))
            sizes = [size for *_, size in waiting]
            if sum(sizes) > self.bucket_bytes or place == len(info["names"]):
                parts = self.link.receive(sum(sizes)).split(sizes)
                self.received += [(n, p.view(d).view(s)) for (n, d, s, _), p in zip(waiting, parts, strict=True)]
                self.buckets.append(sum(sizes))
                waiting = []
        return {"message": "Weights updated"}

    def finish_weight_update(self, json, params, fails):
        if not self.is_updating:
            raise ServerError(f"{self.name}: finish_weight_update called without a matching start_weight_update")
        self.is_updating = False
        self.version = (json or {}).get("weight_version", self.version)
        return {"message": "Weight update finished"}

    def v1_models(self, json, params, fails):
        return {"data": [{"id": name} for name in (self.model_name, *self.adapters)]}

    def v1_load_lora_adapter(self, json, params, fails):
        assert json.keys() == {"lora_name", "lora_path"} and json["lora_name"] not in self.adapters
        assert (Path(json["lora_path"]) / "adapter_config.json").is_file()
        self.adapters[json["lora_name"]] = json["lora_path"]

    def v1_unload_lora_adapter(self, json, params, fails):
        del self.adapters[json["lora_name"]]

    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.asked]


def engine_of(*replicas: ScriptedReplica) -> SimpleNamespace:
    """The part of a ServerEngine that a refit uses."""
    return SimpleNamespace(replicas=list(replicas), excluded=[], policy_version=0, served_model="policy", weights=None)
