"""Refit through a folder, in shared memory or a shared file system, that the trainer writes and the servers read."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.export import WeightFolders
from nemo_edo.refit.server_weights import RelaunchedWeights
from nemo_edo.refit.sleep import SleepOnTrainersGPUs
from nemo_edo.utils.http import ServerError


class DiskSync:
    """A WeightSync of servers. A managed server that does not take the weights is restarted with them; any other is
    excluded until the next push."""

    def __init__(
        self,
        engine: ServerEngine,
        folders: WeightFolders,
        weights: RelaunchedWeights,
        *,
        attempts: int,
        sleep: SleepOnTrainersGPUs | None = None,
    ) -> None:
        """attempts: per server. sleep: where servers share the trainer's GPUs."""
        self._engine = engine
        self._folders = folders
        self._weights = weights
        self._attempts = attempts
        self._sleep = sleep
        self._version: int | None = None
        """The version of this policy that the servers have; None: none."""
        self._folder: Path | None = None
        """The folder of that version."""
        engine.on_restart = self._restore
        engine.on_generated = self._require_current

    def push(self, version: int) -> None:
        """``WeightSync``. Raises ServerError where no server takes the weights."""
        if version == self._version:
            return
        folder = self._folders.write(version)
        if self._sleep is not None:
            self._sleep.make_room()
        self._engine.served_model = self._push_to_all(folder)
        self._engine.policy_version, self._engine.model_folder = version, self._weights.restart_folder(folder)
        self._version, self._folder = version, folder
        self._folders.keep_only(folder)

    def release(self) -> None:
        """``WeightSync``. Sleeping servers lose their weights."""
        if self._sleep is not None:
            self._sleep.begin(self._engine.replicas)
            self._version = None

    def _push_to_all(self, folder: Path) -> str:
        """Returns the name of the servers' model from now on."""
        replicas = [*self._engine.replicas, *self._engine.excluded]
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            errors = list(pool.map(lambda replica: self._try_to_push(replica, folder), replicas))
        failed = [(replica, error) for replica, error in zip(replicas, errors, strict=True) if error is not None]
        if len(failed) == len(replicas):
            raise ServerError(f"no server has taken the weights of {folder}: {failed[0][1]}") from failed[0][1]
        self._engine.excluded = [replica for replica, _ in failed]
        self._engine.replicas = [replica for replica in replicas if replica not in self._engine.excluded]
        for replica, error in failed:
            warnings.warn(f"{replica} is excluded until the next refit: {error}", stacklevel=2)
        return self._weights.served_model(self._engine.replicas[0], folder)

    def _try_to_push(self, replica: Replica, folder: Path) -> ServerError | None:
        for _ in range(self._attempts):
            try:
                if self._sleep is not None:
                    self._sleep.wake_for_weights(replica)
                self._weights.load(replica, folder)
                if self._sleep is not None:
                    self._sleep.wake_for_requests(replica)
                return None
            except ServerError as error:
                last = error
        if not replica.is_managed:
            return last
        try:
            replica.restart(self._weights.restart_folder(folder))
            self._weights.after_restart(replica, folder)
            return None
        except ServerError as error:
            return error

    def _restore(self, replica: Replica) -> None:
        """``ServerEngine.on_restart``: a managed server has loaded the engine's folder."""
        if replica.is_managed:
            self._weights.after_restart(replica, self._folder)
        else:
            self._weights.load(replica, self._folder)

    def _require_current(self, replica: Replica) -> None:
        """``ServerEngine.on_generated``."""
        self._weights.require(replica, self._folder)
