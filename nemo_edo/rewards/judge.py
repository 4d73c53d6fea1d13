"""Rewards by a language model that says whether a response's final answer is equivalent to the problem's. Verdicts are
parsed strictly. Without one (an invalid reply, a server that is down or refuses requests) the judge abstains: the
response's reason says so (``types.ABSTAINED``), its reward of 0 has no meaning, and evaluations leave it out. Above a
share of abstentions the run stops and keeps the verdicts so far. Final answers are extracted, and responses without an
answer or an end are wrong, as with the verifiers."""

import asyncio
import contextlib
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import xxhash

from nemo_edo.config import JudgeConfig
from nemo_edo.data.answers import LONGEST_ANSWER, AnswerFormat, canonical_number, clean_answer
from nemo_edo.data.benchmarks import TEXT
from nemo_edo.errors import PartlyScored, UserError
from nemo_edo.metrics.paired import cohen_kappa
from nemo_edo.rewards.judge_prompt import read_json_verdict, read_verdict, request_body
from nemo_edo.rewards.verifier import CORRECT, TOO_LONG, MathVerifier, Response, read_responses
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, Problem, Rollout, ScoredRollout
from nemo_edo.utils.http import Fault, ServerError, exchange, key_of_environment, open_session, retrying, run_tasks

CHAT = "/chat/completions"
REFUSES_ONE_REQUEST = (400, 413, 422)  # such as one that is too long; others may succeed
WHOLE = (None, "stop", "eos", "end_turn")  # finish_reason of whole replies: others were cut or withheld
NO_VERDICT = "its reply has no verdict"
SHOWN = 200  # characters of a reply's end that messages show
SHOWN_REASONS = 5
WAIT_S = 60.0  # how long to wait for other processes that are writing into the cache
_TABLE = """CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, verdict INTEGER NOT NULL, reply TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, checksum TEXT NOT NULL) WITHOUT ROWID"""
_EXAMPLE = Problem("example", "What is 1 + 1?", "1 + 1 = 2", "2", "example")


@dataclass(frozen=True)
class Reply:
    verdict: bool | None  # whether the response is correct; None: the reply has no verdict
    text: str
    prompt_tokens: int
    completion_tokens: int


def request_key(body: Mapping[str, Any]) -> str:
    """Equal for equal requests: model, prompt with question and answers, and sampling."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checksum(key: str, verdict: int, reply: str) -> str:
    """What binds a verdict to its request: a flipped bit makes no other verdict."""
    return xxhash.xxh3_128_hexdigest(f"{key} {verdict} {reply}".encode(errors="surrogatepass"))


class JudgeCache:
    """Verdicts by request in a SQLite file, so that no run sends a request twice, even after a kill: each is on disk
    before ``put`` returns, and several processes may use the file at the same time. All methods raise UserError for a
    damaged file, and for one that cannot be created."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._usable():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit. Threads use it one at a time.
            self._file = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
            self._file.execute(_TABLE)

    def get(self, key: str) -> bool | None:
        """The verdict; None where there is none yet, or not with its checksum."""
        asked = "SELECT verdict, reply, checksum FROM verdicts WHERE key = ?"
        with self._usable():
            row = self._file.execute(asked, (key,)).fetchone()
        return None if row is None or row[2] != _checksum(key, *row[:2]) else bool(row[0])

    def put(self, key: str, reply: Reply) -> None:
        """reply: has a verdict. Keeps the verdict of another process that was faster."""
        verdict = int(reply.verdict)
        row = (key, verdict, reply.text, reply.prompt_tokens, reply.completion_tokens)
        # What ``get`` does not take for a verdict gives way.
        how = "INSERT OR IGNORE" if self.get(key) is not None else "INSERT OR REPLACE"
        with self._usable():
            checked = (*row, _checksum(key, verdict, reply.text))
            self._file.execute(f"{how} INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", checked)

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError) as error:  # UnicodeError: of a damaged name in a message
            raise UserError(
                f"rewards.judge.cache: {self.path} cannot be used ({error}); remove it, or set another file"
            ) from error


@dataclass
class JudgeReport:
    """What a judge was asked and replied since its last report, what that cost, and whether the rules agree."""

    replies: int = 0  # Received, with or without a verdict
    cached: int = 0  # verdicts taken from the cache
    judged: int = 0  # responses with a verdict
    abstained: Counter[str] = field(default_factory=Counter)  # responses without one, by reason
    without_verdict: str = ""  # the end of the first reply without a verdict
    prompt_tokens: int = 0  # without those of cached verdicts
    completion_tokens: int = 0
    agreement: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # by (judge's, rules') verdict

    def numbers(self, settings: JudgeConfig) -> dict[str, float | int]:
        """The numbers for metrics.jsonl: cost if prices are set, agreement (share) and kappa if rules verified any."""
        counted = ("replies", "cached", "judged", "prompt_tokens", "completion_tokens")
        found: dict[str, float | int] = {name: getattr(self, name) for name in counted}
        found["abstained"] = self.abstained.total()
        if settings.prompt_price is not None:
            prompts, replies = self.prompt_tokens * settings.prompt_price, settings.completion_price
            found["cost"] = (prompts + self.completion_tokens * replies) / 1e6
        counts = [self.agreement[pair] for pair in ((True, True), (True, False), (False, True), (False, False))]
        if compared := sum(counts):
            same = (counts[0] + counts[3]) / compared
            found |= {"compared": compared, "agreement": same, "kappa": cohen_kappa(*counts)}
        return found

    def explained(self, reason: str) -> str:
        """The reason for an abstention, with a reply where it is about replies."""
        return f"{reason}, such as one that ends {self.without_verdict!r}" if reason == NO_VERDICT else reason

    def in_words(self, settings: JudgeConfig) -> str:
        numbers = self.numbers(settings)
        spent = f", which cost {numbers['cost']:.4g}" if "cost" in numbers else ""
        said = [
            f"the judge gave verdicts on {self.judged} responses and abstained on {numbers['abstained']}",
            f"{self.replies} replies received, {self.cached} verdicts from the cache",
            f"{self.prompt_tokens} prompt tokens and {self.completion_tokens} completion tokens{spent}",
        ]
        if "kappa" in numbers:
            said.append(
                f"the rules agree on {numbers['agreement']:.1%} of {numbers['compared']} responses, Cohen's kappa "
                f"{numbers['kappa']:.3f}"
            )
        said += [
            f"no verdict on {count}: {self.explained(reason)}"
            for reason, count in self.abstained.most_common(SHOWN_REASONS)
        ]
        return "; ".join(said)


class Judge:
    """Scores responses by a language model's verdicts. Equal requests are sent once, across runs."""

    def __init__(
        self, settings: JudgeConfig, cache: JudgeCache, answers: AnswerFormat, rules: MathVerifier | None = None
    ) -> None:
        """rules: verifies the same answers for comparison; None: no comparison. Raises UserError where the environment
        has no usable key, which appears in the requests' headers only."""
        self.settings = settings
        self._expected = self._asked = self._abstained = 0  # responses of this collection
        self.report = JudgeReport()
        self._answers = answers
        self._rules = rules
        self._cache = cache
        self._url = settings.url.rstrip("/").removesuffix(CHAT) + CHAT
        self._server = f"the judge (rewards.judge.url {self._url})"
        self._key = key_of_environment("rewards.judge.api_key_variable", settings.api_key_variable)
        self._not_before = 0.0  # the server has asked for no request before this, in the event loop's time

    def check(self) -> None:
        """Asks for one verdict, to find a wrong URL, key or model before any work. Raises UserError without a reply."""
        body = request_body(self.settings, _EXAMPLE, "2", "#### 2")
        found: dict[str, bool | str] = {}
        self._ask({(key := request_key(body)): body}, found, Counter([key]), most_abstained=1)
        if not self.take_report().replies:
            raise UserError(f"the judge (rewards.judge.url {self.settings.url}) does not answer: {found[key]}")

    def take_report(self) -> JudgeReport:
        taken, self.report = self.report, JudgeReport()
        return taken

    def begin(self, scored: Sequence[ScoredRollout], expected: int) -> None:
        """A collection begins, of which some responses are scored already. ``max_abstained`` is of all of it: which of
        its responses are scored together depends on when they ended."""
        self._expected = expected
        self._asked = sum(one.answer is not None for one in scored)
        self._abstained = sum(not one.has_verdict for one in scored)
        if self._rules is not None:
            self._rules.begin(0)

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """Raises PartlyScored, with those that need no verdict or have one, where the run gave up on the judge."""
        responses = read_responses(rollouts, problems, self._answers)
        asked = {
            place: one for place, one in enumerate(responses)
            if one.answer is not None and len(one.answer) <= LONGEST_ANSWER
        }  # fmt: skip
        outcomes, stopped = self._outcomes(asked)
        rules: dict[int, str] = {}  # where the judge has a verdict and the rules could verify the answer
        if self._rules is not None:
            pairs = {
                place: (one.problem.answer, one.answer) for place, one in asked.items()
                if one.problem.answer_kind != TEXT and isinstance(outcomes[place], bool)
            }  # fmt: skip
            for place, verified in zip(pairs, self._rules.verify(list(pairs.values())), strict=True):
                if verified.failure is None:
                    rules[place] = RULES_AGREE if verified.correct == outcomes[place] else RULES_DISAGREE
                    self.report.agreement[outcomes[place], verified.correct] += 1
        scored = []
        for place, response in enumerate(responses):
            form, outcome, agrees = response.answer, outcomes.get(place), rules.get(place, "")
            if form is None:
                reason = response.why_no_answer
            elif outcome is None:
                form, reason = f"{form[:LONGEST_ANSWER]}...", TOO_LONG
            else:
                form = canonical_number(form) or clean_answer(form)
                said = f"final answer {form}, expected {response.problem.answer}, by the judge"
                reason = ABSTAINED + outcome if isinstance(outcome, str) else (CORRECT if outcome else said) + agrees
            scored.append(response.scored(float(outcome is True), form, reason))
        if stopped is not None:
            raise PartlyScored(stopped, [one for one in scored if one.has_verdict])
        return scored

    def _outcomes(self, responses: Mapping[int, Response]) -> tuple[dict[int, bool | str], str | None]:
        """The verdict on each response, or why the judge abstained; and why the run gave up on the judge, if it did."""
        settings, report = self.settings, self.report
        bodies = [request_body(settings, one.problem, one.answer, one.rollout.text) for one in responses.values()]
        keys = [request_key(body) for body in bodies]
        found: dict[str, bool | str] = {key: yes for key in set(keys) if (yes := self._cache.get(key)) is not None}
        report.cached += len(found)
        missing = {key: body for key, body in zip(keys, bodies, strict=True) if key not in found}
        self._asked += len(responses)
        of_collection, stopped = settings.max_abstained * max(self._asked, self._expected), None
        most_abstained = of_collection - self._abstained
        try:
            self._ask(missing, found, Counter(keys), most_abstained)
        except ServerError as error:
            stopped = str(error)
        reasons = Counter(one for key in keys if isinstance(one := found.get(key), str))
        if stopped is None and reasons.total() > most_abstained:
            abstained = self._abstained + reasons.total()
            stopped = (
                f"the judge abstained on {abstained} of {self._asked} responses, and "
                f"rewards.judge.max_abstained is {settings.max_abstained:g}; most often: "
                f"{report.explained(reasons.most_common(1)[0][0])}"
            )
        self._abstained += reasons.total()
        report.abstained += reasons
        report.judged += sum(isinstance(found.get(key), bool) for key in keys)
        return {place: found.get(key, "it was not asked") for place, key in zip(responses, keys, strict=True)}, stopped

    def _ask(
        self,
        bodies: Mapping[str, Mapping[str, Any]],
        found: dict[str, bool | str],
        responses: Counter[str],
        most_abstained: float,
    ) -> None:
        """Sends all requests, given by their keys, and puts each verdict, or the reason why there is none, into
        ``found``; verdicts are in the cache as soon as they arrive. responses: how many each request is for. Above
        ``most_abstained`` of these without a verdict it sends no more. Raises ServerError where the server refuses
        every request (a wrong key, an unknown model)."""
        abstained, waiting = 0, iter(bodies.items())  # shared: each worker takes the next request
        self._not_before = 0.0

        async def work(session: aiohttp.ClientSession) -> None:
            nonlocal abstained
            for key, body in waiting:
                if abstained > most_abstained:
                    return
                found[key] = await self._outcome(session, key, body)
                abstained += responses[key] if isinstance(found[key], str) else 0

        async def ask_all() -> None:
            async with open_session(self._key) as session, asyncio.TaskGroup() as group:
                for _ in range(min(self.settings.max_in_flight, len(bodies))):
                    group.create_task(work(session))

        run_tasks(ask_all())

    async def _outcome(self, session: aiohttp.ClientSession, key: str, body: Mapping[str, Any]) -> bool | str:
        settings, report = self.settings, self.report
        for _ in range(settings.verdict_attempts):
            try:
                retry = retrying(settings.attempts, settings.backoff_s, settings.backoff_limit_s)
                reply = await retry(self._attempt, session, body)
            except Fault as fault:
                return f"{fault} (after {settings.attempts} attempts)"
            if isinstance(reply, str):
                return reply
            report.replies += 1
            report.prompt_tokens += reply.prompt_tokens
            report.completion_tokens += reply.completion_tokens
            if reply.verdict is not None:
                self._cache.put(key, reply)
                return reply.verdict
            report.without_verdict = report.without_verdict or reply.text[-SHOWN:]
        return NO_VERDICT

    async def _attempt(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Reply | str:
        """The reply, or why this request will have none. Raises Fault where another attempt may succeed, ServerError
        where no request can, as where another model answers."""
        settings, now = self.settings, asyncio.get_running_loop().time
        while (left := self._not_before - now()) > 0:
            await asyncio.sleep(left)
        server, limit_s = self._server, settings.request_limit_s
        try:
            answer = await exchange(session, "POST", self._url, self._key, server=server, limit_s=limit_s, body=body)
        except Fault as fault:
            if fault.retry_after_s > settings.retry_after_limit_s:
                return (
                    f"{fault}; it asks for no request for {fault.retry_after_s:g} s (rewards.judge.retry_after_limit_s)"
                )
            self._not_before = max(self._not_before, now() + fault.retry_after_s)  # of all requests
            raise
        except ServerError as error:
            if error.status in REFUSES_ONE_REQUEST:
                return f"it refused the request: {error}"
            raise
        model, expected = answer.get("model") if isinstance(answer, dict) else None, settings.answers_as
        is_version = expected is None and isinstance(model, str) and model.startswith(f"{settings.model}-")
        if model not in (None, expected or settings.model) and not is_version:
            raise ServerError(
                f"{server} answers as the model {str(model)[:200]!r}, and not {expected or settings.model!r}: see to "
                "rewards.judge.model, or set rewards.judge.answers_as to what it says"
            )
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            # null where a reasoning model gave no reply; JSON can write halves of characters, which no file can hold
            text = (choice["message"]["content"] or "").encode(errors="replace").decode()
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Fault(f"no chat completion: {type(error).__name__}: {error}") from error
        read = read_json_verdict if settings.structured_output == "json_schema" else read_verdict
        return Reply(read(text, choice.get("finish_reason") in WHOLE), text, *tokens)
