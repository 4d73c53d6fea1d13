"""Concurrent requests to several replicas, any of which may fail, hang or disappear.

With aiohttp: httpx (0.28) scans its connection pool at the start and end of each request, which keeps a core busy, and
answers waiting, at a few hundred requests in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from nemo_edo.config import ServersConfig
from nemo_edo.errors import RunStopped
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.supervision import BackgroundTasks, Send, State, SupervisedReplica, T
from nemo_edo.utils.http import Fault, ServerError

POLL_STOP_EVERY_S = 0.2


class Dispatcher:
    """Sends each request to the healthy replica with the fewest requests in flight, and retries it after a fault.

    An asynchronous context manager, for one event loop. Replicas are checked and restarted as ``SupervisedReplica``
    says.
    """

    def __init__(
        self, replicas: Sequence[Replica], settings: ServersConfig, restart: Callable[[Replica], None]
    ) -> None:
        """restart: as for ``SupervisedReplica``."""
        self._replicas = replicas
        self._settings = settings
        self._restart = restart

    async def __aenter__(self) -> Dispatcher:
        self._changed = asyncio.Condition()
        self._background = BackgroundTasks()
        self._servers = [
            SupervisedReplica(replica, self._settings, self._restart, self._changed, self._background)
            for replica in self._replicas
        ]
        return self

    async def __aexit__(self, *_) -> None:
        await self._background.cancel()
        for server in self._servers:
            await server.session.close()

    async def send_all(
        self,
        requests: Sequence[Send[T]],
        on_answer: Callable[[int, T], None],
        stop: threading.Event | None = None,
    ) -> None:
        """Sends all requests and calls ``on_answer(index, answer)`` for each answer as it arrives.

        Raises the first error of ``send``, RunStopped soon after ``stop`` is set, and an error of supervision, which is
        a bug; all other requests have been cancelled by then.
        """

        async def one(index: int, request: Send[T]) -> None:
            on_answer(index, await self.send(request))

        tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
        stopping = asyncio.create_task(_raise_once_set(stop or threading.Event()))
        everything = asyncio.gather(*tasks)
        try:
            events = [everything, stopping, self._background.failure]
            done, _ = await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(everything, *tasks, stopping, return_exceptions=True)

    async def send(self, request: Send[T]) -> T:
        """The answer of whichever replica gives one. Raises ServerError where a server refuses the request for good,
        where all attempts have failed, and where every replica is evicted."""
        settings = self._settings
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Fault),
            wait=wait_random_exponential(multiplier=settings.backoff_s, max=settings.backoff_limit_s),
            stop=stop_after_attempt(settings.attempts),
            reraise=True,
        )
        try:
            return await retrying(partial(self._attempt, request))
        except Fault as fault:
            raise ServerError(
                f"a request has failed {settings.attempts} times (generation.servers.attempts); the last time: {fault}"
            ) from fault

    async def _attempt(self, request: Send[T]) -> T:
        server = await self._acquire()
        try:
            return await server.send(request)
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


async def _raise_once_set(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(POLL_STOP_EVERY_S)
    raise RunStopped("asked to stop: responses in progress are discarded")
