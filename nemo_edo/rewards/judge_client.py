"""Requests to a judge: many at a time, tried again where that can help, each at last with a reply or a reason."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import httpx

from nemo_edo.config import JudgeConfig
from nemo_edo.errors import UserError
from nemo_edo.http_client import Fault, ServerError, beginning, described, json_of, require_success
from nemo_edo.rewards.judge_cache import Reply

CHAT = "/chat/completions"
OF_THE_REQUEST = (400, 413, 422)
"""Statuses that refuse one request, such as one that is too long, and say nothing of the next."""
HIDDEN = "***"

NO_VERDICT = "its reply has no verdict"


class Answers(Protocol):
    """Takes what comes, by the place of the request."""

    def reply(self, place: int, reply: Reply) -> None:
        """A reply has come, with a verdict or without."""

    def ended(self, place: int, reason: str | None) -> bool:
        """Nothing more will come: the last reply has a verdict, or there is none for the ``reason``. Whether to go on
        with other requests."""


class JudgeClient:
    """Sends chat requests to one server. The key goes into the requests' headers and nowhere else."""

    def __init__(self, settings: JudgeConfig, read: Callable[[str, bool], bool | None]) -> None:
        """read: the verdict in a reply's text, and whether the reply came to its end; None: it has no verdict.

        Raises UserError where the environment lacks the key."""
        self._settings = settings
        self._read = read
        self._url = settings.url.rstrip("/").removesuffix(CHAT) + CHAT
        self._key = _key(settings)
        self._not_before = 0.0
        """The loop's time before which the server wants no request."""

    def ask(self, bodies: Sequence[Mapping[str, Any]], answers: Answers) -> None:
        """Sends all requests; ends early, with those under way given up, where ``answers`` says so.

        Raises ServerError where the server refuses whatever is asked (a wrong key, an unknown model).
        """
        asyncio.run(self._ask_all(bodies, answers))

    # --- many at a time -------------------------------------------------------------------------------------------

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]], answers: Answers) -> None:
        self._not_before = 0.0
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        waiting = iter(enumerate(bodies))
        goes_on = True

        async def work(client: httpx.AsyncClient) -> None:
            nonlocal goes_on
            for place, body in waiting:  # shared: each worker takes the next
                reason = await self._ask_one(client, body, lambda reply, at=place: answers.reply(at, reply))
                goes_on = answers.ended(place, reason) and goes_on
                if not goes_on:
                    return

        limits = httpx.Limits(max_connections=self._settings.max_in_flight)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
            workers = [asyncio.create_task(work(client)) for _ in range(min(self._settings.max_in_flight, len(bodies)))]
            try:
                pending = set(workers)
                while pending and goes_on:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _ask_one(
        self, client: httpx.AsyncClient, body: Mapping[str, Any], on_reply: Callable[[Reply], None]
    ) -> str | None:
        """None after a reply with a verdict; else why there is none after all attempts."""
        settings, failed, unreadable = self._settings, 0, 0
        while True:
            await self._until_wanted()
            try:
                reply = await self._attempt(client, body)
            except Fault as fault:
                failed += 1
                put_off = self._put_off(fault)
                if put_off > settings.retry_after_limit_s:
                    return f"{fault}; it wants no request for {put_off:g} s (rewards.judge.retry_after_limit_s)"
                if failed == settings.attempts:
                    return f"{fault} (after {failed} attempts)"
                longest = min(settings.backoff_limit_s, settings.backoff_s * 2 ** (failed - 1))
                await asyncio.sleep(random.uniform(0, longest))
            except _Refused as refused:
                return str(refused)
            else:
                on_reply(reply)
                unreadable += reply.verdict is None
                if reply.verdict is not None or unreadable == settings.verdict_attempts:
                    return None if reply.verdict is not None else NO_VERDICT

    async def _attempt(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
        """Raises Fault where another attempt may help, _Refused for this request alone, ServerError for all."""
        try:
            async with asyncio.timeout(self._settings.request_limit_s):
                response = await client.post(self._url, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            said = "no answer within rewards.judge.request_limit_s" if late else described(error)
            raise Fault(self._hidden(said)) from error
        if response.status_code in OF_THE_REQUEST:
            said = f"it refused the request: status {response.status_code}: {beginning(response.content)}"
            raise _Refused(self._hidden(said))
        try:
            require_success(response, f"the judge (rewards.judge.url {self._url})")
            return self._checked(json_of(response))
        except ServerError as error:
            raise ServerError(self._hidden(str(error))) from None  # its cause would show what was hidden
        except Fault as fault:
            raise _Later(self._hidden(str(fault)), _retry_after(response)) from None

    async def _until_wanted(self) -> None:
        while (left := self._not_before - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)

    def _put_off(self, fault: Fault) -> float:
        """Seconds for which the server wants no request at all, 0 where it does not say. None is sent before, unless
        that is longer than is waited for."""
        seconds = fault.seconds if isinstance(fault, _Later) else 0.0
        if seconds <= self._settings.retry_after_limit_s:
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + seconds)
        return seconds

    def _checked(self, body: Any) -> Reply:
        """Raises Fault for what is no chat completion."""
        try:
            choice = body["choices"][0]
            text, whole = choice["message"]["content"], choice.get("finish_reason") != "length"
            usage = body.get("usage") or {}
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Fault(f"no chat completion: it lacks {error}") from error
        text = text or ""  # null where a reasoning model came to no reply
        if not isinstance(text, str):
            raise Fault(f"a reply of type {type(text).__name__}, expected a text")
        return Reply(self._read(text, whole), self._hidden(text), *tokens)

    def _hidden(self, text: str) -> str:
        """Without the key: servers quote what they refuse."""
        return text if not self._key else text.replace(self._key, HIDDEN)


class _Refused(Exception):
    """One request was refused for good; others may be answered."""


class _Later(Fault):
    """A fault whose answer says when to come back."""

    def __init__(self, message: str, seconds: float | None) -> None:
        super().__init__(message)
        self.seconds = seconds or 0.0


def _key(settings: JudgeConfig) -> str | None:
    variable = settings.api_key_variable
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"rewards.judge.api_key_variable is {variable}, which the environment does not have")
    return key


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, from a number or a date (RFC 9110, 10.2.3); None where the header is absent or neither."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
