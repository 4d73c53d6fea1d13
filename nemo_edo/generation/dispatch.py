"""Concurrent requests to several replicas, any of which may fail, hang or disappear."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nemo_edo.config import ServersConfig
from nemo_edo.errors import RunStopped
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.supervision import State, SupervisedReplica
from nemo_edo.utils.http import Fault, ServerError, retrying, run_tasks

POLL_STOP_EVERY_S = 0.2


class Dispatcher:
    """Sends each request to the healthy replica with the fewest requests in flight, and retries it after a fault.
    Replicas are checked and restarted as ``SupervisedReplica`` says."""

    def __init__(
        self, replicas: Sequence[Replica], settings: ServersConfig, restart: Callable[[Replica], None]
    ) -> None:
        """restart: as for ``SupervisedReplica``."""
        self._replicas = replicas
        self._settings = settings
        self._restart = restart

    def post_all(
        self,
        path: str,
        bodies: Sequence[Any],
        read: Callable[[int, Any], None],
        stop: threading.Event | None = None,
    ) -> None:
        """Posts all bodies, and calls ``read(index, answer)`` for each JSON answer as it arrives; where that raises
        Fault, the answer does not fit, and the request is sent again.

        Raises ServerError where a server refuses a request for good, where all of its attempts have failed, and where
        every replica is evicted; RunStopped soon after ``stop`` is set; and an error of supervision, which is a bug.
        All other requests have been cancelled by then.
        """
        with contextlib.suppress(_AllAnswered):
            run_tasks(self._post_all(path, bodies, read, stop or threading.Event()))

    async def _post_all(
        self, path: str, bodies: Sequence[Any], read: Callable[[int, Any], None], stop: threading.Event
    ) -> None:
        self._changed = asyncio.Condition()
        async with contextlib.AsyncExitStack() as sessions, asyncio.TaskGroup() as supervision:
            self._servers = [
                SupervisedReplica(replica, self._settings, self._restart, self._changed, supervision)
                for replica in self._replicas
            ]
            for server in self._servers:
                sessions.push_async_callback(server.session.close)
            supervision.create_task(_raise_once_set(stop))
            async with asyncio.TaskGroup() as requests:
                for index, body in enumerate(bodies):
                    requests.create_task(self._post(path, body, index, read))
            raise _AllAnswered  # ends supervision

    async def _post(self, path: str, body: Any, index: int, read: Callable[[int, Any], None]) -> None:
        try:
            await retrying(self._settings)(self._attempt, path, body, index, read)
        except Fault as fault:
            raise ServerError(
                f"a request has failed {self._settings.attempts} times (generation.servers.attempts); the last time: "
                f"{fault}"
            ) from fault

    async def _attempt(self, path: str, body: Any, index: int, read: Callable[[int, Any], None]) -> None:
        server = await self._acquire()
        try:
            await server.post(path, body, index, read)
        finally:
            async with self._changed:
                server.in_flight -= 1
                self._changed.notify()

    async def _acquire(self) -> SupervisedReplica:
        """Waits for a replica with room for one more request. Raises ServerError where all are evicted."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._with_room() or self._all_evicted())
            if self._all_evicted():
                reasons = "; ".join(f"{server.replica}: {server.last_error}" for server in self._servers)
                raise ServerError(f"no server is left: {reasons}")
            server = min(self._with_room(), key=lambda server: server.in_flight)
            server.in_flight += 1
            return server

    def _with_room(self) -> list[SupervisedReplica]:
        limit = self._settings.max_in_flight
        return [server for server in self._servers if server.state is State.HEALTHY and server.in_flight < limit]

    def _all_evicted(self) -> bool:
        return all(server.state is State.EVICTED for server in self._servers)


class _AllAnswered(Exception):
    """Every request has its answer."""


async def _raise_once_set(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(POLL_STOP_EVERY_S)
    raise RunStopped("asked to stop: responses in progress are discarded")
