"""Concurrent requests to a judge, retried where that may help; each ends with a verdict or a reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp

from nemo_edo.config import JudgeConfig
from nemo_edo.rewards.judge_cache import JudgeCache, Reply
from nemo_edo.rewards.judge_prompt import read_json_verdict, read_verdict
from nemo_edo.rewards.judge_report import NO_VERDICT, JudgeReport
from nemo_edo.utils.api_key import key_of_environment
from nemo_edo.utils.http import Fault, ServerError, exchange, open_session, retrying, run_tasks

CHAT = "/chat/completions"
REFUSES_ONE_REQUEST = (400, 413, 422)
"""Statuses that refuse one request, such as one that is too long; others may succeed."""
WHOLE = (None, "stop", "eos", "end_turn")
"""The finish_reason of a reply that ended by itself: others were cut, or withheld by a filter."""
SHOWN = 200
"""Characters of a reply's end that messages show."""


class Verdicts:
    """What became of some requests, by their keys."""

    def __init__(self, responses: Counter[str], most_abstained: float) -> None:
        """responses: how many each request is for. most_abstained: of these responses; above it the judge is given
        up."""
        self.given: dict[str, bool] = {}
        self.reasons: dict[str, str] = {}
        """Why a request has no verdict."""
        self.abstained = 0
        """Responses."""
        self._responses = responses
        self._most_abstained = most_abstained

    def abstain(self, key: str, reason: str) -> None:
        self.reasons[key] = reason
        self.abstained += self._responses[key]

    @property
    def too_many_abstained(self) -> bool:
        return self.abstained > self._most_abstained


class JudgeClient:
    """Sends chat requests to one server. The key appears in the requests' headers only."""

    def __init__(self, settings: JudgeConfig, cache: JudgeCache) -> None:
        """Raises UserError where the environment has no usable key."""
        self._settings = settings
        self._cache = cache
        self._read = read_json_verdict if settings.structured_output == "json_schema" else read_verdict
        self._url = settings.url.rstrip("/").removesuffix(CHAT) + CHAT
        self._server = f"the judge (rewards.judge.url {self._url})"
        self._key = key_of_environment("rewards.judge.api_key_variable", settings.api_key_variable)
        self._not_before = 0.0
        """The server has asked for no request before this, in the event loop's time."""

    def ask(self, bodies: Mapping[str, Mapping[str, Any]], verdicts: Verdicts, report: JudgeReport) -> None:
        """Sends all requests, given by their keys, and notes what becomes of them; verdicts are in the cache as soon as
        they arrive. After too many abstentions it sends no more, and awaits those in flight.

        Raises ServerError where the server refuses every request (a wrong key, an unknown model).
        """

        async def ask_all() -> None:
            self._not_before = 0.0
            waiting = iter(bodies.items())  # shared: each worker takes the next request
            async with open_session(self._key) as session, asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.max_in_flight, len(bodies))):
                    group.create_task(self._work(session, waiting, verdicts, report))

        run_tasks(ask_all())

    async def _work(
        self,
        session: aiohttp.ClientSession,
        waiting: Iterator[tuple[str, Mapping[str, Any]]],
        verdicts: Verdicts,
        report: JudgeReport,
    ) -> None:
        settings = self._settings
        for key, body in waiting:
            if verdicts.too_many_abstained:
                return
            reason = NO_VERDICT
            for _ in range(settings.verdict_attempts):
                try:
                    retry = retrying(settings.attempts, settings.backoff_s, settings.backoff_limit_s)
                    reply = await retry(self._attempt, session, body)
                except Fault as fault:
                    reason = f"{fault} (after {settings.attempts} attempts)"
                    break
                except _Refused as refusal:
                    reason = str(refusal)
                    break
                report.replies += 1
                report.prompt_tokens += reply.prompt_tokens
                report.completion_tokens += reply.completion_tokens
                if reply.verdict is not None:
                    self._cache.put(key, reply)
                    verdicts.given[key] = reply.verdict
                    break
                report.without_verdict = report.without_verdict or reply.text[-SHOWN:]
            if key not in verdicts.given:
                verdicts.abstain(key, reason)

    async def _attempt(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Reply:
        """Raises Fault where another attempt may succeed, _Refused where this request cannot, ServerError where no
        request can."""
        settings, now = self._settings, asyncio.get_running_loop().time
        while (left := self._not_before - now()) > 0:
            await asyncio.sleep(left)
        server, limit_s = self._server, settings.request_limit_s
        try:
            answer = await exchange(session, "POST", self._url, self._key, server=server, limit_s=limit_s, body=body)
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
        self._require_model(answer.get("model") if isinstance(answer, dict) else None)
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            # null where a reasoning model gave no reply; JSON can write halves of characters, which no file can hold
            text = (choice["message"]["content"] or "").encode(errors="replace").decode()
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Fault(f"no chat completion: {type(error).__name__}: {error}") from error
        return Reply(self._read(text, choice.get("finish_reason") in WHOLE), text, *tokens)

    def _require_model(self, found: Any) -> None:
        """Raises ServerError for another model's answer; one that names no model passes."""
        asked, expected = self._settings.model, self._settings.answers_as
        is_version = expected is None and isinstance(found, str) and found.startswith(f"{asked}-")
        if found not in (None, expected or asked) and not is_version:
            raise ServerError(
                f"{self._server} answers as the model {str(found)[:200]!r}, and not {expected or asked!r}: see to "
                "rewards.judge.model, or set rewards.judge.answers_as to what it says"
            )


class _Refused(Exception):
    """This request ends without a verdict; others may have one."""
