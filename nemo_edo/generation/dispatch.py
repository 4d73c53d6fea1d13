"""Concurrent requests to several replicas, any of which may fail, hang or disappear."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_edo.config import ServersConfig
from nemo_edo.generation.replica import Replica
from nemo_edo.utils.http import Fault, NoAnswer, ServerError, TimeLimit, open_session, retrying, run_tasks

CHECK_AFTER_S = 10.0  # silence after which a managed replica with requests in flight is checked
ALLOWANCE_S = 300.0
ASSUMED_TOKEN_S = 0.1
MEASURED_ANSWERS, PACE_FACTOR = 64, 4.0
"""A request may take so many times as long a token as answers so far, on average over their tokens: the first ones are
short, and what runs beside a long one changes."""
CHECK_EVERY_S = 0.2
HAND_OVER_EVERY_S = 20.0

log = logging.getLogger(__name__)


def limit_s(tokens: int, of_a_token: float = ASSUMED_TOKEN_S) -> float:
    """Seconds that a response of so many tokens may take."""
    return ALLOWANCE_S + of_a_token * tokens


@dataclass(eq=False)
class Dispatcher:
    """Sends each request to the available replica with the fewest requests in flight, and retries it after a fault.
    A fault, or a long silence of a managed replica, makes a replica unavailable until, after the time of a Retry-After,
    it answers a health check or one of its requests within ``health_limit_s``. Otherwise it is restarted, and its
    requests go to others (a server that the run does not manage keeps them until ``request_limit_s``, and is waited
    for); after ``restarts`` restarts in a row without an answer it is retired."""

    replicas: Sequence[Replica]
    settings: ServersConfig
    restart: Callable[[Replica], None] = Replica.restart  # until it may get requests; blocks; may raise ServerError
    require_weights: Callable[[Replica], None] | None = None
    """Called before a replica that was in doubt gets requests again; raises ServerError where it has others."""
    _measured: int = 0  # requests so far, of which there are the tokens and the seconds
    _tokens: int = 0
    _seconds: float = 0.0

    def post_all(
        self,
        path: str,
        bodies: Sequence[Any],
        read: Callable[[int, Any], None],
        check: Callable[[], None] | None = None,
        hand_over: Callable[[], None] | None = None,
    ) -> None:
        """Posts all bodies, and calls ``read(index, answer)`` for each JSON answer as it arrives; where that raises
        Fault, the request is sent again. check, hand_over: called in other threads, often, and now and then; what
        either raises ends the requests. Raises ServerError where a server refuses a request for good, all of its
        attempts have failed, or every replica is retired; all other requests are cancelled by then."""

        async def post_all() -> None:
            self._changed = asyncio.Condition()  # notified when a replica may take a request, and when one is retired
            async with contextlib.AsyncExitStack() as sessions, asyncio.TaskGroup() as group:
                self._servers = [_ReplicaState(replica) for replica in self.replicas]
                for server in self._servers:
                    sessions.push_async_callback(server.session.close)
                background = [self._supervise(server) for server in self._servers]
                calls = ((CHECK_EVERY_S, check), (HAND_OVER_EVERY_S, hand_over))
                background += [_every(seconds, call) for seconds, call in calls if call is not None]
                tasks = [group.create_task(work) for work in background]
                async with asyncio.TaskGroup() as requests:
                    for index, body in enumerate(bodies):
                        requests.create_task(self._post(path, body, index, read))
                for task in tasks:
                    task.cancel()

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY:  # a request in flight has a file, and the usual limit is 1,024
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        run_tasks(post_all())

    async def _post(self, path: str, body: Any, index: int, read: Callable[[int, Any], None]) -> None:
        settings = self.settings
        try:
            again = retrying(settings.attempts, settings.backoff_s, settings.backoff_limit_s)
            await again(self._attempt, path, body, index, read)
        except Fault as fault:
            hint = "; lower generation.servers.max_in_flight" if fault.retry_after_s else ""
            failed = f"a request has failed {settings.attempts} times (generation.servers.attempts)"
            raise ServerError(f"{failed}; the last time: {fault}{hint}") from fault

    async def _attempt(self, path: str, body: Any, index: int, read: Callable[[int, Any], None]) -> None:
        """Raises Fault where another attempt may succeed, ServerError where no replica is left or one refuses."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._with_room() or all(one.is_retired for one in self._servers))
            if not self._with_room():
                reasons = "; ".join(f"{server.replica}: {server.last_error}" for server in self._servers)
                raise ServerError(f"no server is left: {reasons}")
            server = min(self._with_room(), key=lambda server: server.in_flight)
            server.in_flight += 1
        start, sent_at = server.replica.starts, _now()
        limit = self._limit_of(body)
        try:
            answer = await server.replica.exchange(server.session, "POST", path, limit, body=body)
            read(index, answer)
            self._measure(answer, _now() - sent_at)
        except Fault as fault:
            if start == server.replica.starts and server.is_available:
                server.last_error = str(fault)
                server.hangs = isinstance(fault, TimeLimit) and server.last_answer < sent_at
                # A server that says when to retry is well: it gets no requests until then.
                server.wait_s = min(fault.retry_after_s, self.settings.retry_after_limit_s)
                server.is_available = False
                server.fault.set()
            raise Fault(f"{server.replica}: {fault}", fault.retry_after_s) from None
        finally:
            async with self._changed:
                server.in_flight -= 1
                self._changed.notify()
        if start == server.replica.starts:
            server.last_answer, server.restarts = _now(), 0

    def _limit_of(self, body: Any) -> float:
        """Seconds that a request may take, its wait in the server's queue included."""
        if self.settings.request_limit_s is not None:
            return self.settings.request_limit_s
        is_known = self._measured >= MEASURED_ANSWERS
        of_a_token = PACE_FACTOR * self._seconds / self._tokens if is_known else ASSUMED_TOKEN_S
        return limit_s(body.get(self.settings.token_limit, 0), of_a_token)

    def _measure(self, answer: Any, seconds: float) -> None:
        tokens = (answer.get("usage") or {}).get("completion_tokens") if isinstance(answer, dict) else None
        if tokens:
            self._measured += 1
            self._tokens += tokens
            self._seconds += seconds

    def _with_room(self) -> list[_ReplicaState]:
        return [one for one in self._servers if one.is_available and one.in_flight < self.settings.max_in_flight]

    async def _supervise(self, server: _ReplicaState) -> None:
        """Whenever the replica is in doubt (a fault, its process's end, a managed one's silence), checks it."""
        while not server.is_retired:
            while not server.fault.is_set() and not server.replica.has_ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(server.fault.wait(), CHECK_AFTER_S)
                is_silent = server.in_flight > 0 and server.last_answer < _now() - CHECK_AFTER_S
                if server.replica.is_managed and is_silent:
                    break
            server.is_available = False
            await asyncio.sleep(server.wait_s)
            is_well = not server.hangs and await self._answers(server) and await self._has_its_weights(server)
            is_well = is_well or await self._restarted(server)
            server.fault.clear()
            server.hangs, server.wait_s = False, 0.0
            async with self._changed:
                server.is_available, server.is_retired = is_well, not is_well
                self._changed.notify_all()

    async def _answers(self, server: _ReplicaState) -> bool:
        """Whether it answers a health check or, as many requests can delay the check, a request within the limit."""
        begun = _now()
        while not server.replica.has_ended:
            try:
                await server.replica.exchange(
                    server.session, "GET", server.replica.health, self.settings.health_limit_s, answers_json=False
                )
                return True
            except (Fault, ServerError) as error:
                server.last_error = str(error)
                if server.replica.any_answer_is_health and getattr(error, "status", None) is not None:
                    return True
            if _now() - begun > self.settings.health_limit_s:
                return server.last_answer > begun
            await asyncio.sleep(self.settings.backoff_s)
        server.last_error = server.replica.ending()
        return False

    async def _has_its_weights(self, server: _ReplicaState) -> bool:
        """Another's supervisor may have restarted it, in less time than the check takes. Raises ServerError where it
        has answered requests before, which may then have been of other weights."""
        if self.require_weights is None:
            return True
        try:
            await asyncio.to_thread(self.require_weights, server.replica)
        except NoAnswer:
            return True  # it is busy: the next check of all weights sees to it
        except ServerError as error:
            if server.last_answer > 0:
                raise
            server.last_error = str(error)
            return False
        return True

    async def _restarted(self, server: _ReplicaState) -> bool:
        """Restarts the replica with exponential backoff; False where it has used up its restarts."""
        settings = self.settings
        while server.restarts < settings.restarts:
            server.restarts += 1
            log.warning("%s: %s; restart %d", server.replica, server.last_error, server.restarts)
            try:
                await asyncio.to_thread(self.restart, server.replica)
                return True
            except ServerError as error:
                server.last_error = str(error)
                await asyncio.sleep(min(settings.backoff_limit_s, settings.backoff_s * 2**server.restarts))
        log.warning("%s is retired: %s", server.replica, server.last_error)
        return False


class _ReplicaState:
    """A replica's requests and health in one ``post_all``. Times are the event loop's."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.session = open_session(replica.key)
        self.in_flight = 0
        self.is_available = not replica.has_ended
        self.is_retired = False
        self.last_error = "it has not answered yet"
        self.last_answer = 0.0
        self.restarts = 0  # since the last answer
        self.fault = asyncio.Event()
        self.hangs = False  # whether a request's time passed without any answer: only a restart helps
        self.wait_s = 0.0  # seconds for which it has asked for no requests


async def _every(seconds: float, call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(call)


def _now() -> float:
    return asyncio.get_running_loop().time()
