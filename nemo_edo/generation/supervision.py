"""Health checks and restarts of the replicas that requests are sent to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from typing import Any, TypeVar

import aiohttp

from nemo_edo.config import ServersConfig
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import HEALTH
from nemo_edo.utils.http import Fault, IncomingAnswer, ServerError, described

T = TypeVar("T")
Send = Callable[[Replica, aiohttp.ClientSession], Awaitable[T]]
"""One attempt at a request. Raises Fault, or an error of aiohttp, where another attempt may succeed."""

CHECK_AFTER_S = 10.0
"""Silence after which a replica with requests in flight is checked."""
MAX_CONSECUTIVE_FAULTS = 100
"""After so many without an answer in between, a replica is restarted even if it calls itself healthy."""
KEEPALIVE_S = 2.0
"""Idle connections are closed after this time: uvicorn closes them after 5 s, perhaps just as a request is sent."""

log = logging.getLogger(__name__)


class State(Enum):
    HEALTHY = auto()
    """Takes requests."""
    SUSPECT = auto()
    """Takes none until it has passed a health check or was restarted."""
    EVICTED = auto()
    """Could not be restarted; takes no more requests."""


class BackgroundTasks:
    """Tasks that nobody awaits. An error in one of them becomes the result of ``failure``."""

    def __init__(self) -> None:
        self.failure: asyncio.Future = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task] = set()

    def start(self, work: Coroutine) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failure.done():
            self.failure.set_exception(task.exception())

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SupervisedReplica:
    """A replica that takes requests while it is healthy.

    A fault, or a long silence, makes it SUSPECT. Once the time of a Retry-After is over, it is HEALTHY again as soon as
    it answers a health check or one of its requests within ``health_limit_s``. Otherwise ``restart`` is called, which
    for a server that the run does not manage waits for its return; after ``restarts`` calls in a row without an answer
    the replica is EVICTED.
    """

    def __init__(
        self,
        replica: Replica,
        settings: ServersConfig,
        restart: Callable[[Replica], None],
        changed: asyncio.Condition,
        background: BackgroundTasks,
    ) -> None:
        """restart: blocks; raises ServerError where the replica does not return. changed: notified when the replica may
        take requests again, and when it is evicted."""
        self.replica = replica
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),  # 0: no limit
            headers=replica.headers,
            timeout=aiohttp.ClientTimeout(total=None),  # ``send`` sets the limit
            trust_env=not replica.is_managed,
            auto_decompress=False,
        )
        self.state = State.HEALTHY
        self.in_flight = 0
        self.last_error = "it has not answered yet"
        self._settings = settings
        self._call_restart = restart
        self._changed = changed
        self._background = background
        self._timeouts: set[asyncio.Timeout] = set()
        """Timeouts of the requests in flight."""
        self._last_answer = 0.0
        """When the last answer came, in the event loop's time."""
        self._not_before = 0.0
        """The server has asked for no requests before this, in the event loop's time."""
        self._answered = asyncio.Event()
        self._consecutive_faults = 0
        self._consecutive_restarts = 0
        if replica.has_ended:
            self._suspect()
        background.start(self._check_when_silent())

    async def send(self, send: Send[T]) -> T:
        """One attempt at a request. Raises Fault where another attempt may succeed."""
        process, sent_at = self.replica.starts, _now()
        try:
            async with asyncio.timeout(self._settings.request_limit_s) as timeout:
                self._timeouts.add(timeout)
                answer = await send(self.replica, self.session)
        except (aiohttp.ClientError, TimeoutError, Fault) as error:
            if process == self.replica.starts:
                self._record_fault(error, sent_at)
            raise Fault(f"{self.replica}: {self._description(error)}") from None  # the cause may show the key
        finally:
            self._timeouts.discard(timeout)
        if process == self.replica.starts:
            self._record_answer()
        return answer

    def _record_answer(self) -> None:
        self._last_answer = _now()
        self._answered.set()
        self._consecutive_faults = self._consecutive_restarts = 0

    def _record_fault(self, error: Exception, sent_at: float) -> None:
        """A server that says when to retry is well: it gets no requests until then."""
        wait_s = min(error.retry_after_s, self._settings.retry_after_limit_s) if isinstance(error, Fault) else 0.0
        self._not_before = max(self._not_before, _now() + wait_s)
        self._consecutive_faults += not wait_s
        if self.state is not State.HEALTHY:
            return
        self.last_error = self._description(error)
        silent_since_sent = isinstance(error, TimeoutError) and self._last_answer < sent_at
        self._suspect(must_restart=silent_since_sent or self._consecutive_faults >= MAX_CONSECUTIVE_FAULTS)

    async def _check_when_silent(self) -> None:
        while True:
            await asyncio.sleep(CHECK_AFTER_S)
            silent = self._last_answer < _now() - CHECK_AFTER_S
            if self.state is State.HEALTHY and self.in_flight and silent:
                self._suspect()

    # --- recovery -------------------------------------------------------------------------------------------------

    def _suspect(self, *, must_restart: bool = False) -> None:
        """must_restart: whatever a health check would say."""
        self.state = State.SUSPECT
        self._background.start(self._recover(must_restart))

    async def _recover(self, must_restart: bool) -> None:
        while (left := self._not_before - _now()) > 0:
            await asyncio.sleep(left)
        recovered = (not must_restart and await self._is_healthy()) or await self._restart()
        self.state = State.HEALTHY if recovered else State.EVICTED
        async with self._changed:
            self._changed.notify_all()

    async def _is_healthy(self) -> bool:
        """Whether it answers a health check or a request within the limit: many requests can delay the check."""
        self._answered.clear()
        signs = [asyncio.create_task(self._health_check()), asyncio.create_task(self._answered.wait())]
        try:
            await asyncio.wait(signs, timeout=self._settings.health_limit_s, return_when=asyncio.FIRST_COMPLETED)
            return not self.replica.has_ended and any(sign.done() and sign.result() for sign in signs)
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def _health_check(self) -> bool:
        """True once the server calls itself healthy; False once its process has ended."""
        while not self.replica.has_ended:
            try:
                async with self.session.get(self.replica.url + HEALTH, allow_redirects=False) as response:
                    if 200 <= response.status < 300:
                        return True
                self.last_error = f"{HEALTH}: status {response.status}"
            except aiohttp.ClientError as error:
                self.last_error = f"{HEALTH}: {self._description(error)}"
            await asyncio.sleep(self._settings.backoff_s)
        self.last_error = self.replica.ending()
        return False

    async def _restart(self) -> bool:
        """Restarts the replica with exponential backoff; False where it has used up its restarts."""
        self._expire_requests()
        settings = self._settings
        while self._consecutive_restarts < settings.restarts:
            self._consecutive_restarts += 1
            log.warning("%s: %s; restart %d", self.replica, self.last_error, self._consecutive_restarts)
            try:
                await asyncio.to_thread(self._call_restart, self.replica)
            except ServerError as error:
                self.last_error = str(error)
                backoff = settings.backoff_s * 2**self._consecutive_restarts
                await asyncio.sleep(min(settings.backoff_limit_s, backoff))
            else:
                self._consecutive_faults = 0
                return True
        log.warning("%s is evicted: %s", self.replica, self.last_error)
        return False

    def _expire_requests(self) -> None:
        """Requests in flight time out now, so that other replicas get them."""
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(_now())

    def _description(self, error: Exception) -> str:
        if isinstance(error, Fault):
            return str(error)
        return "no answer in time" if isinstance(error, TimeoutError) else self.replica.key.hide(described(error))


async def post(replica: Replica, session: aiohttp.ClientSession, path: str, body: Any, limit: int) -> Any:
    """The value of a server's JSON answer of at most ``limit`` bytes. Raises Fault or ServerError as
    ``IncomingAnswer.value``, and errors of aiohttp."""
    async with session.post(replica.url + path, json=body, allow_redirects=False) as response:
        answer = IncomingAnswer(f"POST {path}", response.status, response.headers, replica.key, limit)
        async for piece in response.content.iter_any():
            answer.add(piece)
    return answer.value(str(replica))


def _now() -> float:
    return asyncio.get_running_loop().time()
