"""Refit through a folder, in shared memory or a shared file system, that the trainer writes and the servers read."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import MODELS
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.export import WeightFolders
from nemo_edo.refit.server_weights import name_of_weights, name_weights, require_weights, reset_prefix_cache
from nemo_edo.refit.sleep import SleepOnTrainersGPUs
from nemo_edo.utils.http import ServerError


class DiskSync:
    """A WeightSync of vLLM servers, which reload weights in place; the weights' name is the folder's path.

    A managed server that does not take the weights is restarted with them; any other is excluded until the next push.
    The subclasses are for servers that load weights in another way.
    """

    def __init__(
        self,
        engine: ServerEngine,
        folders: WeightFolders,
        *,
        attempts: int,
        limit_s: float,
        sleep: SleepOnTrainersGPUs | None = None,
    ) -> None:
        """attempts: per server. limit_s: seconds that a server may take to load weights. sleep: where servers share
        the trainer's GPUs."""
        self._engine = engine
        self._folders = folders
        self._attempts = attempts
        self._limit_s = limit_s
        self._sleep = sleep
        self._version: int | None = None
        """The version of this policy that the servers have; None: none."""
        self._folder: Path | None = None
        """The folder of that version."""
        engine.weights = self

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where no server takes the weights."""
        if version == self._version:
            return
        folder = self._folders.write(version)
        if self._sleep is not None:
            self._sleep.make_room()
        engine, replicas = self._engine, [*self._engine.replicas, *self._engine.excluded]
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            errors = list(pool.map(lambda replica: self._try_to_push(replica, folder), replicas))
        failed = [(replica, error) for replica, error in zip(replicas, errors, strict=True) if error is not None]
        if len(failed) == len(replicas):
            raise ServerError(f"no server has taken the weights of {folder}: {failed[0][1]}") from failed[0][1]
        for replica, error in failed:
            warnings.warn(f"{replica} is excluded until the next refit: {error}", stacklevel=2)
        engine.excluded = [replica for replica, _ in failed]
        engine.replicas = [replica for replica in replicas if replica not in engine.excluded]
        for replica in engine.replicas:
            replica.model_folder = self._restart_folder(folder)
        engine.served_model = self._served_model(engine.replicas[0], folder)
        engine.policy_version = self._version = version
        self._folder = folder
        self._folders.keep_only(folder)

    def release(self) -> None:
        """``WeightSync``. Sleeping servers lose their weights."""
        if self._sleep is not None:
            self._sleep.begin(self._engine.replicas)
            self._version = None

    def restore(self, replica: Replica) -> None:
        """``ServedWeights``. A managed server has loaded its ``model_folder``."""
        if replica.is_managed:
            self._after_restart(replica, self._folder)
        else:
            self._load(replica, self._folder)

    def require(self, replica: Replica) -> None:
        """``ServedWeights``."""
        require_weights(replica, str(self._folder))

    def _try_to_push(self, replica: Replica, folder: Path) -> ServerError | None:
        for _ in range(self._attempts):
            try:
                if self._sleep is not None:
                    self._sleep.wake_for_weights(replica)
                self._load(replica, folder)
                if self._sleep is not None:
                    self._sleep.wake_for_requests(replica)
                return None
            except ServerError as error:
                last = error
        if not replica.is_managed:
            return last
        try:
            replica.restart(self._restart_folder(folder))
            self._after_restart(replica, folder)
            return None
        except ServerError as error:
            return error

    # --- what depends on the kind of server ---------------------------------------------------------------------------

    def _load(self, replica: Replica, folder: Path) -> None:
        """Afterwards the server uses the folder's weights, and nothing cached from earlier ones."""
        self._reload(replica, folder)
        reset_prefix_cache(replica)
        name_weights(replica, str(folder))

    def _reload(self, replica: Replica, folder: Path) -> None:
        # The worker extension renews a tied output layer, too (generation/inside_server/tied_head.py).
        method = "reload_policy" if replica.has_worker_extension else "reload_weights"
        body = {"method": method, "kwargs": {"weights_path": str(folder)}}
        replica.request("POST", "/collective_rpc", json=body, timeout_s=self._limit_s)

    def _restart_folder(self, folder: Path) -> Path:
        """The model folder for the start of a server."""
        return folder

    def _after_restart(self, replica: Replica, folder: Path) -> None:
        """The rest of ``_load`` for a server that was started with ``_restart_folder(folder)``."""
        name_weights(replica, str(folder))

    def _served_model(self, replica: Replica, folder: Path) -> str:
        """The model that requests name."""
        return replica.model_name


class AdapterSync(DiskSync):
    """For vLLM with LoRA: the base weights are loaded once, and each version's folder is a PEFT adapter."""

    def _load(self, replica: Replica, folder: Path) -> None:
        if Path(name_of_weights(replica)).parent != folder.parent:  # another policy's
            self._reload(replica, self._folders.base)
        self._after_restart(replica, folder)
        reset_prefix_cache(replica)

    def _restart_folder(self, folder: Path) -> Path:
        return self._folders.base

    def _after_restart(self, replica: Replica, folder: Path) -> None:
        for model in replica.request("GET", MODELS)["data"]:
            if (name := model["id"]) != replica.model_name:
                replica.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, answers_json=False)
        body = {"lora_name": self._served_model(replica, folder), "lora_path": str(folder)}
        replica.request("POST", "/v1/load_lora_adapter", json=body, timeout_s=self._limit_s, answers_json=False)
        name_weights(replica, str(folder))

    def _served_model(self, replica: Replica, folder: Path) -> str:
        return f"{folder.parent.name}_{folder.name}"


class RestartSync(DiskSync):
    """For TensorRT-LLM, which loads weights only when it starts, and cannot tell which it has."""

    def _load(self, replica: Replica, folder: Path) -> None:
        replica.restart(folder)

    def _after_restart(self, replica: Replica, folder: Path) -> None:
        pass

    def require(self, replica: Replica) -> None:
        """``ServedWeights``: a server that answers has what it was started with."""
