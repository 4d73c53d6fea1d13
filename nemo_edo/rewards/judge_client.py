"""Concurrent requests to a judge, retried where that may help; each ends with a reply or a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from nemo_edo.config import JudgeConfig
from nemo_edo.rewards.judge_cache import JudgeCache, Reply, request_key
from nemo_edo.rewards.judge_prompt import read_json_verdict, read_verdict
from nemo_edo.utils.api_key import key_of_environment
from nemo_edo.utils.http import Fault, ServerError, exchange, open_session, retrying, run_tasks

CHAT = "/chat/completions"
REFUSES_ONE_REQUEST = (400, 413, 422)
"""Statuses that refuse one request, such as one that is too long; others may succeed."""
NO_VERDICT = "its reply has no verdict"


class Replies:
    """What became of some requests. Replies are on disk as soon as they arrive."""

    def __init__(
        self, cache: JudgeCache, bodies: Sequence[Mapping[str, Any]], times: Counter[int], *, most: float
    ) -> None:
        """times: how many responses each request is for. most: responses that the judge may abstain on."""
        self.bodies = bodies
        self.verdicts: dict[int, bool] = {}
        """By the index of the request, as ``reasons``."""
        self.reasons: dict[int, str] = {}
        """Why a request has no verdict."""
        self.abstained = 0
        """Responses."""
        self.received = self.prompt_tokens = self.completion_tokens = 0
        self._cache = cache
        self._times = times
        self._most = most

    @property
    def is_above(self) -> bool:
        return self.abstained > self._most

    def add(self, place: int, reply: Reply) -> None:
        self._cache.put(request_key(self.bodies[place]), reply)
        self.received += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        if reply.verdict is not None:
            self.verdicts[place] = reply.verdict

    def abstain(self, place: int, reason: str) -> None:
        self.reasons[place] = reason
        self.abstained += self._times[place]


class JudgeClient:
    """Sends chat requests to one server. The key appears in the requests' headers only."""

    def __init__(self, settings: JudgeConfig) -> None:
        """Raises UserError where the environment has no usable key."""
        self._settings = settings
        self._read = read_json_verdict if settings.structured_output == "json_schema" else read_verdict
        self._url = settings.url.rstrip("/").removesuffix(CHAT) + CHAT
        self._server = f"the judge (rewards.judge.url {self._url})"
        self._key = key_of_environment("rewards.judge.api_key_variable", settings.api_key_variable)
        self._not_before = 0.0
        """The server has asked for no request before this, in the event loop's time."""

    def ask(self, replies: Replies) -> None:
        """Sends all requests; stops early, and cancels those in flight, after too many abstentions.

        Raises ServerError where the server refuses every request (a wrong key, an unknown model).
        """
        with contextlib.suppress(_Enough):
            run_tasks(self._ask_all(replies))

    async def _ask_all(self, replies: Replies) -> None:
        self._not_before = 0.0
        waiting = iter(enumerate(replies.bodies))
        async with open_session(self._key) as session, asyncio.TaskGroup() as group:
            for _ in range(min(self._settings.max_in_flight, len(replies.bodies))):
                group.create_task(self._work(session, waiting, replies))

    async def _work(self, session: aiohttp.ClientSession, waiting: Any, replies: Replies) -> None:
        """waiting: shared: each worker takes the next request."""
        for place, body in waiting:
            try:
                await self._ask_one(session, place, body, replies)
            except (Fault, _Refused) as error:
                replies.abstain(place, str(error))
                if replies.is_above:
                    raise _Enough from None

    async def _ask_one(
        self, session: aiohttp.ClientSession, place: int, body: Mapping[str, Any], replies: Replies
    ) -> None:
        """Raises Fault or _Refused where no attempt gave a verdict."""
        for _ in range(self._settings.verdict_attempts):
            try:
                reply = await retrying(self._settings)(self._attempt, session, body)
            except Fault as fault:
                raise _Refused(f"{fault} (after {self._settings.attempts} attempts)") from fault
            replies.add(place, reply)
            if reply.verdict is not None:
                return
        raise _Refused(NO_VERDICT)

    async def _attempt(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Reply:
        """Raises Fault where another attempt may succeed, _Refused where this request cannot, ServerError where no
        request can."""
        settings, now = self._settings, asyncio.get_running_loop().time
        while (left := self._not_before - now()) > 0:
            await asyncio.sleep(left)
        try:
            answer = await exchange(
                session, "POST", self._url, self._key, server=self._server, limit_s=settings.request_limit_s, json=body
            )
        except Fault as fault:
            if fault.retry_after_s > settings.retry_after_limit_s:
                raise _Refused(
                    f"{fault}; it asks for no request for {fault.retry_after_s:g} s (rewards.judge.retry_after_limit_s)"
                ) from None
            self._not_before = max(self._not_before, now() + fault.retry_after_s)  # of all requests
            raise
        except ServerError as error:
            if error.status in REFUSES_ONE_REQUEST:
                raise _Refused(f"it refused the request: {error}") from None
            raise
        return self._reply(answer)

    def _reply(self, body: Any) -> Reply:
        """Raises Fault where the body is not a chat completion, and ServerError where another model has answered."""
        self._require_model(body.get("model") if isinstance(body, dict) else None)
        try:
            choice, usage = body["choices"][0], body.get("usage") or {}
            # null where a reasoning model gave no reply; JSON can write halves of characters, which no file can hold
            text = (choice["message"]["content"] or "").encode(errors="replace").decode()
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Fault(f"no chat completion: {type(error).__name__}: {error}") from error
        return Reply(self._read(text, choice.get("finish_reason") != "length"), text, *tokens)

    def _require_model(self, found: Any) -> None:
        """An answer that names no model passes."""
        asked, expected = self._settings.model, self._settings.answers_as
        versions = () if expected else (f"{asked}-",)
        if found in (None, expected or asked) or (isinstance(found, str) and found.startswith(versions)):
            return
        raise ServerError(
            f"{self._server} answers as the model {str(found)[:200]!r}, and not {expected or asked!r}: see to "
            "rewards.judge.model, or set rewards.judge.answers_as to what it says"
        )


class _Refused(Exception):
    """This request ends without a verdict; others may have one."""


class _Enough(Exception):
    """The judge has abstained too often."""
