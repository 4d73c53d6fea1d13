"""Concurrent requests to a judge, retried where that may help; each ends with a reply or a reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import httpx

from nemo_edo.config import JudgeConfig
from nemo_edo.rewards.judge_cache import Reply
from nemo_edo.utils.api_key import key_of_environment
from nemo_edo.utils.http import UNENCODED, Fault, IncomingAnswer, ServerError, body_limit, described

CHAT = "/chat/completions"
REFUSES_ONE_REQUEST = (400, 413, 422)
"""Statuses that refuse one request, such as one that is too long; others may succeed."""
NO_VERDICT = "its reply has no verdict"


class ReplySink(Protocol):
    """Receives replies, by the index of the request."""

    def reply(self, place: int, reply: Reply) -> None:
        """A reply has arrived, with or without a verdict."""

    def ended(self, place: int, reason: str | None) -> bool:
        """The request is finished: its last reply has a verdict, or there is none because of ``reason``. Returns
        whether to continue with other requests."""


class JudgeClient:
    """Sends chat requests to one server. The key appears in the requests' headers only."""

    def __init__(self, settings: JudgeConfig, read: Callable[[str, bool], bool | None]) -> None:
        """read: from a reply's text, and whether it is complete, to its verdict; None: it has none.

        Raises UserError where the environment has no usable key."""
        self._settings = settings
        self._read = read
        self._url = settings.url.rstrip("/").removesuffix(CHAT) + CHAT
        self._key = key_of_environment("rewards.judge.api_key_variable", settings.api_key_variable)
        self._not_before = 0.0
        """The server has asked for no request before this, in the event loop's time."""

    def ask(self, bodies: Sequence[Mapping[str, Any]], sink: ReplySink) -> None:
        """Sends all requests; stops early, and cancels those in flight, where ``sink`` says so.

        Raises ServerError where the server refuses every request (a wrong key, an unknown model).
        """
        asyncio.run(self._ask_all(bodies, sink))

    # --- concurrent requests ----------------------------------------------------------------------------------------

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]], sink: ReplySink) -> None:
        self._not_before = 0.0
        headers = {**self._key.headers, **UNENCODED}
        waiting = iter(enumerate(bodies))
        going = True

        async def work(client: httpx.AsyncClient) -> None:
            nonlocal going
            for place, body in waiting:  # shared: each worker takes the next
                reason = await self._ask_one(client, body, lambda reply, at=place: sink.reply(at, reply))
                going = sink.ended(place, reason) and going
                if not going:
                    return

        limits = httpx.Limits(max_connections=self._settings.max_in_flight)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
            workers = [asyncio.create_task(work(client)) for _ in range(min(self._settings.max_in_flight, len(bodies)))]
            try:
                pending = set(workers)
                while pending and going:
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
        """None after a reply with a verdict; otherwise why no attempt gave one."""
        settings, failed, unreadable = self._settings, 0, 0
        while True:
            await self._wait_for_server()
            try:
                reply = await self._attempt(client, body)
            except Fault as fault:
                failed += 1
                wait_s = self._note_retry_after(fault)
                if wait_s > settings.retry_after_limit_s:
                    return f"{fault}; it asks for no request for {wait_s:g} s (rewards.judge.retry_after_limit_s)"
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
        """Raises Fault where another attempt may succeed, _Refused where this request cannot, ServerError where no
        request can."""
        try:
            async with asyncio.timeout(self._settings.request_limit_s):
                answer = await self._post(client, body)
        except (httpx.HTTPError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            said = "no answer within rewards.judge.request_limit_s" if late else described(error)
            raise Fault(self._key.hide(said)) from None  # the cause may show the key
        if answer.status in REFUSES_ONE_REQUEST:
            raise _Refused(f"it refused the request: status {answer.status}: {answer.beginning()}")
        return self._checked(answer.value(f"the judge (rewards.judge.url {self._url})"))

    async def _post(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> IncomingAnswer:
        async with client.stream("POST", self._url, json=body) as response:
            path, limit = response.request.url.path, body_limit(self._settings.max_tokens)
            answer = IncomingAnswer(path, response.status_code, response.headers, self._key, limit)
            async for piece in response.aiter_raw():
                answer.add(piece)
        return answer

    async def _wait_for_server(self) -> None:
        while (left := self._not_before - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)

    def _note_retry_after(self, fault: Fault) -> float:
        """Seconds for which the server asks for no requests (0: it does not ask). Delays all requests accordingly,
        unless that is above retry_after_limit_s."""
        seconds = fault.retry_after_s
        if seconds <= self._settings.retry_after_limit_s:
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + seconds)
        return seconds

    def _checked(self, body: Any) -> Reply:
        """Raises Fault where the body is not a chat completion, and ServerError where another model has answered."""
        self._require_model(body)
        try:
            choice = body["choices"][0]
            text, whole = choice["message"]["content"], choice.get("finish_reason") != "length"
            usage = body.get("usage") or {}
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise Fault(f"no chat completion: it lacks {error}") from error
        text = text or ""  # null where a reasoning model gave no reply
        if not isinstance(text, str):
            raise Fault(f"a reply of type {type(text).__name__}, expected a text")
        text = text.encode(errors="replace").decode()  # JSON can write halves of characters, which no file can hold
        return Reply(self._read(text, whole), text, *tokens)

    def _require_model(self, body: Any) -> None:
        """An answer that names no model passes."""
        found = body.get("model") if isinstance(body, dict) else None
        asked, expected = self._settings.model, self._settings.answers_as
        versions = () if expected else (f"{asked}-",)
        if found in (None, expected or asked) or (isinstance(found, str) and found.startswith(versions)):
            return
        raise ServerError(
            f"the judge (rewards.judge.url {self._url}) answers as the model {str(found)[:200]!r}, and not "
            f"{expected or asked!r}: see to rewards.judge.model, or set rewards.judge.answers_as to what it says"
        )


class _Refused(Exception):
    """This request was refused for good; others may succeed."""
