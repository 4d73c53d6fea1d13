"""Many requests at a time over several servers, of which any may fail, hang or be gone.

By aiohttp: httpx (0.28) looks at every connection of its pool at every request's begin and end, so that a few hundred
requests in flight keep a core busy with looking, and answers wait in line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from nemo_edo.config import ServersConfig
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import HEALTH
from nemo_edo.http_client import Fault, ServerError, described

T = TypeVar("T")
Send = Callable[[Replica, aiohttp.ClientSession], Awaitable[T]]
"""One attempt at a request. Raises Fault, or what aiohttp raises, where another attempt may succeed."""

LOOK_EVERY_S = 10.0
"""Between two looks at a server that has answered nothing meanwhile."""
FAULTS_IN_A_ROW = 100
"""Without an answer between: then a server that calls itself healthy is not taken at its word."""
IDLE_S = 2.0
"""A connection that was idle for longer is not used again: after 5 s, uvicorn's default, the server closes it, perhaps
just then."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Line:
    """A replica as the dispatcher sees it."""

    replica: Replica
    session: aiohttp.ClientSession
    is_up: bool = False
    is_out: bool = False
    outstanding: int = 0
    timeouts: set[asyncio.Timeout] = field(default_factory=set)
    """Of the requests that are under way."""
    last_answer: float = 0.0
    """The loop's time."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each answer; whoever waits for the next one clears it."""
    faults_in_a_row: int = 0
    returns_in_a_row: int = 0
    """Restarts, or waits for a server of others, without an answer between."""
    why: str = "it has not answered yet"
    """The last thing that went wrong."""
    mending: asyncio.Task | None = None


class Dispatcher:
    """Sends each request to the replica with the fewest under way; a request that fails is tried again elsewhere.

    An asynchronous context manager, for one event loop. A replica that fails is looked at before it is given more: one
    whose process has ended, or that answers nothing within ``health_limit_s``, neither the look nor a request, is
    brought back by ``bring_back`` (which may wait, and raises ServerError). It is left out after ``restarts`` times in
    a row without an answer.
    """

    def __init__(
        self, replicas: Sequence[Replica], settings: ServersConfig, bring_back: Callable[[Replica], None]
    ) -> None:
        self._replicas = replicas
        self._settings = settings
        self._bring_back = bring_back
        self._lines: list[_Line] = []
        self._free = asyncio.Condition()

    async def __aenter__(self) -> Dispatcher:
        self.broken: asyncio.Future = asyncio.get_running_loop().create_future()
        """Done, with its error, once the dispatcher's own work has failed: an error of the program."""
        for replica in self._replicas:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),  # 0: none
                headers=replica.headers,
                timeout=aiohttp.ClientTimeout(total=None),  # each attempt has a limit of its own
                trust_env=not replica.is_local,
            )
            line = _Line(replica, session, is_up=not replica.has_ended)
            self._lines.append(line)
            if not line.is_up:
                self._mend(line)
        self._watching = self._task(self._watch())
        return self

    async def __aexit__(self, *_) -> None:
        tasks = [self._watching, *(line.mending for line in self._lines if line.mending is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in self._lines:
            await line.session.close()

    async def ask(self, send: Send[T]) -> T:
        """The answer of whichever replica gives one. Raises ServerError where a request is refused for good, where its
        attempts are used up, or where no replica is left."""
        settings = self._settings
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Fault),
            wait=wait_random_exponential(multiplier=settings.backoff_s, max=settings.backoff_limit_s),
            stop=stop_after_attempt(settings.attempts),
            reraise=True,
        )
        try:
            return await retrying(self._attempt, send)
        except Fault as fault:
            raise ServerError(
                f"a request has failed {settings.attempts} times (generation.servers.attempts); the last time: {fault}"
            ) from fault

    # --- one attempt ----------------------------------------------------------------------------------------------

    async def _attempt(self, send: Send[T]) -> T:
        line = await self._take()
        generation, begun = line.replica.generation, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._settings.request_limit_s) as limit:
                line.timeouts.add(limit)
                answer = await send(line.replica, line.session)
        except (aiohttp.ClientError, TimeoutError, Fault) as error:
            self._failed(line, generation, begun, error)
            raise Fault(f"{line.replica}: {_in_words(error)}") from error
        finally:
            line.timeouts.discard(limit)
            await self._give_back(line)
        if generation == line.replica.generation:
            line.last_answer = asyncio.get_running_loop().time()
            line.answered.set()
            line.faults_in_a_row = line.returns_in_a_row = 0
        return answer

    async def _take(self) -> _Line:
        """A place at the replica with the fewest requests under way, once there is one."""
        async with self._free:
            await self._free.wait_for(lambda: self._open_lines() or self._all_out())
            if self._all_out():
                raise self._gone()
            line = min(self._open_lines(), key=lambda line: line.outstanding)
            line.outstanding += 1
            return line

    async def _give_back(self, line: _Line) -> None:
        async with self._free:
            line.outstanding -= 1
            self._free.notify()

    def _open_lines(self) -> list[_Line]:
        return [line for line in self._lines if line.is_up and line.outstanding < self._settings.max_in_flight]

    def _all_out(self) -> bool:
        return all(line.is_out for line in self._lines)

    def _gone(self) -> ServerError:
        reasons = "; ".join(f"{line.replica}: {line.why}" for line in self._lines)
        return ServerError(f"no server is left: {reasons}")

    # --- failures -------------------------------------------------------------------------------------------------

    def _failed(self, line: _Line, generation: int, begun: float, error: Exception) -> None:
        if generation != line.replica.generation:
            return  # of a process that is gone already
        line.faults_in_a_row += 1
        if not line.is_up:
            return  # it is being looked at
        line.why = _in_words(error)
        silent = isinstance(error, TimeoutError) and line.last_answer < begun
        self._mend(line, distrust=silent or line.faults_in_a_row >= FAULTS_IN_A_ROW)

    def _mend(self, line: _Line, *, distrust: bool = False) -> None:
        """Gives the line no requests until it has been looked at. distrust: not even its health is believed."""
        line.is_up = False
        line.mending = self._task(self._mended(line, distrust))

    def _task(self, work: Coroutine) -> asyncio.Task:
        """Nobody waits for its result, so that an error would go unseen, and requests wait for ever."""

        def look(task: asyncio.Task) -> None:
            if not task.cancelled() and task.exception() is not None and not self.broken.done():
                self.broken.set_exception(task.exception())

        task = asyncio.create_task(work)
        task.add_done_callback(look)
        return task

    async def _mended(self, line: _Line, distrust: bool) -> None:
        if distrust or not await self._is_well(line):
            await self._return(line)
        if not line.is_out:
            line.is_up = True
        async with self._free:
            self._free.notify_all()

    async def _is_well(self, line: _Line) -> bool:
        """Whether it answers within the limit: a look at its health, or any of the requests that it holds. A server
        that is busy with many may keep the look waiting."""
        line.answered.clear()
        signs = [asyncio.create_task(self._looked_at(line)), asyncio.create_task(line.answered.wait())]
        try:
            await asyncio.wait(signs, timeout=self._settings.health_limit_s, return_when=asyncio.FIRST_COMPLETED)
            return not line.replica.has_ended and any(sign.done() and sign.result() for sign in signs)
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def _looked_at(self, line: _Line) -> bool:
        """Looks at its health until it says that it is well (true), or its process has ended (false)."""
        while not line.replica.has_ended:
            try:
                async with line.session.get(line.replica.url + HEALTH) as response:
                    if response.ok:
                        return True
                line.why = f"{HEALTH}: status {response.status}"
            except aiohttp.ClientError as error:
                line.why = f"{HEALTH}: {described(error)}"
            await asyncio.sleep(self._settings.backoff_s)
        line.why = "its process has ended"
        return False

    async def _return(self, line: _Line) -> None:
        """Brings the replica back, or leaves it out."""
        for limit in line.timeouts:  # what it still holds goes elsewhere
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        settings = self._settings
        while line.returns_in_a_row < settings.restarts:
            line.returns_in_a_row += 1
            log.warning("%s: %s; bringing it back (%d)", line.replica, line.why, line.returns_in_a_row)
            try:
                await asyncio.to_thread(self._bring_back, line.replica)
            except ServerError as error:
                line.why = str(error)
                await asyncio.sleep(min(settings.backoff_limit_s, settings.backoff_s * 2**line.returns_in_a_row))
            else:
                line.faults_in_a_row = 0
                return
        line.is_out = True
        log.warning("%s is left out: %s", line.replica, line.why)

    async def _watch(self) -> None:
        """Looks at servers that hold requests and have answered none of them for a while."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for line in self._lines:
                if line.is_up and line.outstanding and line.last_answer < loop.time() - LOOK_EVERY_S:
                    self._mend(line)


def _in_words(error: Exception) -> str:
    if isinstance(error, Fault):
        return str(error)
    return "no answer within its time" if isinstance(error, TimeoutError) else described(error)
