"""Health checks and restarts of the replicas that requests are sent to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from nemo_edo.config import ServersConfig
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import HEALTH
from nemo_edo.utils.http import Fault, ServerError, TimeLimit, exchange

CHECK_AFTER_S = 10.0
"""Silence after which a replica with requests in flight is checked."""

log = logging.getLogger(__name__)


class State(Enum):
    HEALTHY = auto()
    """Takes requests."""
    SUSPECT = auto()
    """Takes none until it has passed a health check or was restarted."""
    EVICTED = auto()
    """Could not be restarted; takes no more requests."""


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
        background: asyncio.TaskGroup,
    ) -> None:
        """restart: blocks; raises ServerError where the replica does not return. changed: notified when the replica may
        take requests again, and when it is evicted."""
        self.replica = replica
        self.session = replica.open_session()
        self.state = State.HEALTHY
        self.in_flight = 0
        self.last_error = "it has not answered yet"
        self._settings = settings
        self._call_restart = restart
        self._changed = changed
        self._background = background
        self._expiries: set[asyncio.Timeout] = set()
        """Of the requests in flight: a restart ends them."""
        self._last_answer = 0.0
        """When the last answer came, in the event loop's time."""
        self._not_before = 0.0
        """The server has asked for no requests before this, in the event loop's time."""
        self._answered = asyncio.Event()
        self._consecutive_restarts = 0
        if replica.has_ended:
            self._suspect()
        background.create_task(self._check_when_silent())

    async def post(self, path: str, body: Any, index: int, read: Callable[[int, Any], None]) -> None:
        """One attempt at a request, whose answer ``read`` gets. Raises Fault where another attempt may succeed."""
        process, sent_at = self.replica.starts, _now()
        try:
            async with asyncio.timeout(None) as expiry:
                self._expiries.add(expiry)
                read(index, await self._exchange("POST", path, self._settings.request_limit_s, body))
        except (Fault, TimeoutError) as error:
            fault = error if isinstance(error, Fault) else TimeLimit("it was restarted meanwhile")
            if process == self.replica.starts:
                self._record_fault(fault, sent_at)
            raise Fault(f"{self.replica}: {fault}") from None
        finally:
            self._expiries.discard(expiry)
        if process == self.replica.starts:
            self._last_answer = _now()
            self._answered.set()
            self._consecutive_restarts = 0

    async def _exchange(self, method: str, path: str, limit_s: float, body: Any = None) -> Any:
        replica, wants_json = self.replica, body is not None
        url, server = replica.url + path, str(replica)
        return await exchange(
            self.session, method, url, replica.key, server=server, limit_s=limit_s, json=body, answers_json=wants_json
        )

    def _record_fault(self, fault: Fault, sent_at: float) -> None:
        """A server that says when to retry is well: it gets no requests until then."""
        wait_s = min(fault.retry_after_s, self._settings.retry_after_limit_s)
        self._not_before = max(self._not_before, _now() + wait_s)
        if self.state is State.HEALTHY:
            self.last_error = str(fault)
            self._suspect(must_restart=isinstance(fault, TimeLimit) and self._last_answer < sent_at)

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
        self._background.create_task(self._recover(must_restart))

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

    async def _health_check(self) -> bool:
        """True once the server calls itself healthy; False once its process has ended."""
        while not self.replica.has_ended:
            try:
                await self._exchange("GET", HEALTH, self._settings.health_limit_s)
                return True
            except (Fault, ServerError) as error:
                self.last_error = str(error)
            await asyncio.sleep(self._settings.backoff_s)
        self.last_error = self.replica.ending()
        return False

    async def _restart(self) -> bool:
        """Restarts the replica with exponential backoff; False where it has used up its restarts."""
        for expiry in self._expiries:
            if not expiry.expired():
                expiry.reschedule(_now())  # so that other replicas get its requests
        settings = self._settings
        while self._consecutive_restarts < settings.restarts:
            self._consecutive_restarts += 1
            log.warning("%s: %s; restart %d", self.replica, self.last_error, self._consecutive_restarts)
            try:
                await asyncio.to_thread(self._call_restart, self.replica)
                return True
            except ServerError as error:
                self.last_error = str(error)
                backoff = settings.backoff_s * 2**self._consecutive_restarts
                await asyncio.sleep(min(settings.backoff_limit_s, backoff))
        log.warning("%s is evicted: %s", self.replica, self.last_error)
        return False


def _now() -> float:
    return asyncio.get_running_loop().time()
