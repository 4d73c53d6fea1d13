"""Refit through a folder: the trainer writes it to memory or a file system that the servers share, and they read it."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.http_client import ServerError
from nemo_edo.parallel.main_rank import on_main_for_long
from nemo_edo.refit.export import WeightFolders
from nemo_edo.refit.server_weights import ServerWeights
from nemo_edo.refit.sleep import Awake, Sleep


class DiskSync:
    """A WeightSync of servers. A server that does not take the weights is started again with them, where the run can do
    that, and else left out until the next push."""

    def __init__(
        self,
        engine: ServerEngine,
        folders: WeightFolders,
        weights: ServerWeights,
        *,
        attempts: int,
        sleep: Sleep | None = None,
    ) -> None:
        """attempts: at one server, before it counts as failed. sleep: where servers share the trainer's GPUs."""
        self._engine = engine
        self._folders = folders
        self._weights = weights
        self._attempts = attempts
        self._sleep = sleep or Awake()
        self._version: int | None = None
        """What the servers have of this policy; None: something else."""
        self._folder: Path | None = None
        """Where it stands."""
        engine.on_restart = self._came_back
        engine.on_drawn = self._require_current

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where no server takes the weights."""
        if version == self._version:
            return
        folder = self._folders.write(version)
        self._engine.served_model = on_main_for_long(lambda: self._bring_all(folder))
        self._engine.policy_version, self._engine.model_folder = version, self._weights.starts_with(folder)
        self._version, self._folder = version, folder
        self._folders.keep_only(folder)

    def release(self) -> None:
        """``WeightSync``. Servers that sleep lose their weights."""
        if self._sleep.begin(self._engine.replicas):
            self._version = None

    def _bring_all(self, folder: Path) -> str:
        """The name of the servers' model from now on."""
        replicas = [*self._engine.replicas, *self._engine.left_out]
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            errors = list(pool.map(lambda replica: self._try_to_bring(replica, folder), replicas))
        failed = [(replica, error) for replica, error in zip(replicas, errors, strict=True) if error is not None]
        if len(failed) == len(replicas):
            raise ServerError(f"no server has taken the weights of {folder}: {failed[0][1]}") from failed[0][1]
        self._engine.left_out = [replica for replica, _ in failed]
        self._engine.replicas = [replica for replica in replicas if replica not in self._engine.left_out]
        for replica, error in failed:
            warnings.warn(f"{replica} is left out until the next refit: {error}", stacklevel=2)
        return self._weights.served_model(self._engine.replicas[0], folder)

    def _try_to_bring(self, replica: Replica, folder: Path) -> ServerError | None:
        for _ in range(self._attempts):
            try:
                self._sleep.wake_for_weights(replica)
                self._weights.load(replica, folder)
                self._sleep.wake_for_requests(replica)
                return None
            except ServerError as error:
                last = error
        if not replica.is_local:
            return last
        try:
            replica.restart(self._weights.starts_with(folder))
            self._weights.started(replica, folder)
            return None
        except ServerError as error:
            return error

    def _came_back(self, replica: Replica) -> None:
        """``ServerEngine.on_restart``: a server of the run's own was started with the engine's folder."""
        if replica.is_local:
            self._weights.started(replica, self._folder)
        else:
            self._weights.load(replica, self._folder)

    def _require_current(self, replica: Replica) -> None:
        """``ServerEngine.on_drawn``."""
        self._weights.require(replica, self._folder)
