"""Refit through a folder, in shared memory or a shared file system, that the trainer writes and the servers read."""

import logging
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import MODELS
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.servers import (
    SleepOnTrainersGPUs,
    name_of_weights,
    name_weights,
    require_weights,
    reset_prefix_cache,
)
from nemo_edo.rollouts.store import require_room
from nemo_edo.utils.http import ServerError
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Worker

logger = logging.getLogger(__name__)
BASE = "base"
SHARD_BYTES = 5 * 10**9  # of a file of weights, at most


class WeightFolders:
    """Hugging Face folders below ``root``, one for each version. A folder gets its name only once it is complete. Rank
    0's worker writes, and gathers one tensor at a time from the others."""

    def __init__(self, root: Path, workers: Workers, num_bytes: int, *, adapters_only: bool = False) -> None:
        """root: a folder for this run only; what an earlier process has left there is removed. num_bytes: size of the
        model's weights. adapters_only: a version is a folder of PEFT adapters, and the base weights have one folder."""
        self._workers = workers
        self._num_bytes = num_bytes
        try:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            self.root = Path(tempfile.mkdtemp(dir=root, prefix="refit_"))
        except OSError as error:
            raise UserError(f"generation.refit.folder: {root} cannot be written: {error}") from error
        self.base = self.root / BASE if adapters_only else None  # of the base weights; None where adapters are merged
        self._end = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def write(self, version: int) -> Path:
        """Writes the current weights. Raises UserError where the file system lacks room."""
        if self.base is None:
            return self._write(f"version_{version:05d}", Worker.export, SHARD_BYTES, True)
        if not self.base.is_dir():
            self._write(BASE, Worker.export, SHARD_BYTES, False)
        return self._write(f"version_{version:05d}", Worker.export_adapters, None)

    def _write(self, name: str, export: Callable[..., None], *settings: Any) -> Path:
        require_room("generation.refit.folder", self.root, self._num_bytes)
        folder, unfinished = self.root / name, self.root / f"{name}.part"
        for left in (folder, unfinished):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir()
        self._workers.call(export, unfinished, *settings)
        return unfinished.rename(folder)

    def keep_only(self, folder: Path) -> None:
        """Removes all other versions, which no server needs any more."""
        for other in self.root.iterdir():
            if other not in (folder, self.base):
                shutil.rmtree(other)


@dataclass(eq=False, repr=False)
class DiskSync:
    """A WeightSync of vLLM servers, which reload weights in place; the weights' name is the folder's path. A managed
    server that does not take the weights is restarted with them; any other is excluded until the next push."""

    engine: ServerEngine
    folders: WeightFolders
    _: KW_ONLY
    attempts: int  # per server
    limit_s: float  # seconds that a server may take to load weights
    sleep: SleepOnTrainersGPUs | None = None  # where servers share the trainer's GPUs

    def __post_init__(self) -> None:
        self._version: int | None = None  # of this policy, that the servers have
        self._folder: Path | None = None  # of that version
        self.engine.weights = self

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where no server takes the weights."""
        if version == self._version:
            return
        begin = time.monotonic()
        folder = self.folders.write(version)
        num_bytes, written = sum(file.stat().st_size for file in folder.iterdir()), time.monotonic()
        if self.sleep is not None:
            if self._version is not None:  # awake, after a training that ended early
                self.release()
            self.sleep.make_room()
        engine, replicas = self.engine, [*self.engine.replicas, *self.engine.excluded]
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            errors = list(pool.map(lambda replica: self._try_to_push(replica, folder), replicas))
        failed = [(replica, error) for replica, error in zip(replicas, errors, strict=True) if error is not None]
        if len(failed) == len(replicas):
            raise ServerError(f"no server has taken the weights of {folder}: {failed[0][1]}") from failed[0][1]
        for replica, error in failed:
            if self.sleep is not None and replica.is_managed:
                replica.stop()  # it would keep its memory while the trainer trains; the next push starts it
            warnings.warn(f"{replica} is excluded until the next refit: {error}", stacklevel=2)
        engine.excluded = [replica for replica, _ in failed]
        engine.replicas = [replica for replica in replicas if replica not in engine.excluded]
        for replica in engine.replicas:
            replica.model_folder = self._restart_folder(folder)
        engine.served_model = self._served_model(engine.replicas[0], folder)
        engine.policy_version = self._version = version
        self._folder = folder
        logger.info(
            "refit %d: %.2f GB written in %.1f s and loaded by %d servers in %.1f s",
            version, num_bytes / 1e9, written - begin, len(engine.replicas), time.monotonic() - written,
        )  # fmt: skip
        self.folders.keep_only(folder)

    def release(self) -> None:
        """``WeightSync``. Sleeping servers lose their weights."""
        if self.sleep is not None:
            self.sleep.begin([replica for replica in self.engine.replicas if not replica.has_ended])
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
        for attempt in range(self.attempts + replica.is_managed):
            try:
                if attempt == self.attempts:
                    replica.restart(self._restart_folder(folder))
                    self._after_restart(replica, folder)
                    return None
                if self.sleep is not None:
                    self.sleep.wake(replica, "weights")
                self._load(replica, folder)
                if self.sleep is not None:
                    self.sleep.wake(replica, "kv_cache")
                return None
            except ServerError as error:
                last = error
        return last

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
        replica.request("POST", "/collective_rpc", json=body, timeout_s=self.limit_s)

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
    """For vLLM with LoRA: the base weights are loaded once, or after each sleep, and each version's folder is a PEFT
    adapter."""

    def _load(self, replica: Replica, folder: Path) -> None:
        # Another policy's, or none: a server that has slept (level 2) keeps its weights' name and not the weights.
        if self.sleep is not None or Path(name_of_weights(replica)).parent != folder.parent:
            self._reload(replica, self.folders.base)
        self._after_restart(replica, folder)
        reset_prefix_cache(replica)

    def _restart_folder(self, folder: Path) -> Path:
        return self.folders.base

    def _after_restart(self, replica: Replica, folder: Path) -> None:
        for model in replica.request("GET", MODELS)["data"]:
            if (name := model["id"]) != replica.model_name:
                replica.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, answers_json=False)
        body = {"lora_name": self._served_model(replica, folder), "lora_path": str(folder)}
        replica.request("POST", "/v1/load_lora_adapter", json=body, timeout_s=self.limit_s, answers_json=False)
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
