"""Rewards by a language model that says whether a response's final answer is equivalent to the problem's.

Verdicts are parsed strictly. Without one (an invalid reply, a server that is down or refuses requests) the judge
abstains: the response's reason says so (``types.ABSTAINED``), its reward of 0 has no meaning, and evaluations leave it
out. Above a share of abstentions the run stops and keeps the verdicts so far.

Final answers are extracted, and responses without an answer or an end are wrong, as with the verifiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_edo.config import JudgeConfig
from nemo_edo.data.answers import LONGEST_ANSWER, AnswerFormat, canonical_number, clean_answer
from nemo_edo.data.benchmarks import TEXT
from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.rewards.judge_cache import JudgeCache, request_key
from nemo_edo.rewards.judge_client import JudgeClient, Replies
from nemo_edo.rewards.judge_prompt import request_body
from nemo_edo.rewards.judge_report import JudgeReport
from nemo_edo.rewards.math_verifier import TOO_LONG, MathVerifier
from nemo_edo.rewards.verifier import CORRECT, Response, read_responses
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, Problem, Rollout, ScoredRollout
from nemo_edo.utils.http import ServerError

_EXAMPLE = Problem("example", "What is 1 + 1?", "1 + 1 = 2", "2", "example")


@dataclass(frozen=True)
class Judgment:
    verdict: bool | None
    """None: the judge abstained, or was not asked."""
    reason: str | None = None
    """Why it abstained; None where it was not asked, because the run gave up on it before."""
    rules: bool | None = None
    """The verdict of the rules, that is, of MathVerifier; None: not verifiable, or not asked."""


class Judge:
    """Asks a language model for verdicts. Equal requests are sent once, across runs."""

    def __init__(self, settings: JudgeConfig, cache: JudgeCache, rules: MathVerifier | None) -> None:
        """rules: verifies the same answers for comparison; None: no comparison. Raises UserError where the environment
        lacks the key."""
        self.settings = settings
        self.report = JudgeReport()
        self._cache = cache
        self._rules = rules
        self._client = JudgeClient(settings)

    def check(self) -> None:
        """Asks for one verdict, to find a wrong URL, key or model before any work. Raises UserError where no reply
        comes; the reply needs no verdict."""
        replies = Replies(self._cache, [request_body(self.settings, _EXAMPLE, "2", "#### 2")], Counter([0]), most=1)
        self._client.ask(replies)
        if not replies.received:
            raise UserError(f"the judge (rewards.judge.url {self.settings.url}) does not answer: {replies.reasons[0]}")

    def take_report(self) -> JudgeReport:
        """The report of everything since the last call."""
        taken, self.report = self.report, JudgeReport()
        return taken

    def verdicts(self, responses: Sequence[Response]) -> tuple[list[Judgment], str | None]:
        """A judgment of each response, in order, and why the run gave up on the judge before all were asked about
        (None: it did not)."""
        bodies: dict[str, Mapping[str, Any]] = {}
        keys = []
        for response in responses:
            body = request_body(self.settings, response.problem, response.answer, response.rollout.text)
            keys.append(request_key(body))
            bodies[keys[-1]] = body
        known = {key: Judgment(reply.verdict) for key in bodies if (reply := self._cache.get(key)) is not None}
        self.report.cached += len(known)
        missing = [key for key in bodies if key not in known]
        times = Counter(keys)
        replies = Replies(
            self._cache,
            [bodies[key] for key in missing],
            Counter({place: times[key] for place, key in enumerate(missing)}),
            most=self.settings.max_abstained * len(responses),
        )
        stopped = self._ask(replies, len(responses)) if missing else None
        found = {
            key: Judgment(replies.verdicts.get(place), replies.reasons.get(place)) for place, key in enumerate(missing)
        }
        judged = self._compare_with_rules(responses, [known.get(key) or found[key] for key in keys])
        self._count(judged, replies)
        return judged, stopped

    def _ask(self, replies: Replies, asked: int) -> str | None:
        try:
            self._client.ask(replies)
        except ServerError as error:
            return str(error)
        if not replies.is_above:
            return None
        return (
            f"the judge abstained on {replies.abstained} of {asked} responses, and rewards.judge.max_abstained is "
            f"{self.settings.max_abstained:g}; most often: {Counter(replies.reasons.values()).most_common(1)[0][0]}"
        )

    def begin(self) -> None:
        """The rules have their whole budget again."""
        if self._rules is not None:
            self._rules.begin(0)

    def _compare_with_rules(self, responses: Sequence[Response], judged: Sequence[Judgment]) -> list[Judgment]:
        if self._rules is None:
            return list(judged)
        comparable = [
            response.problem.answer_kind != TEXT and one.verdict is not None
            for response, one in zip(responses, judged, strict=True)
        ]
        pairs = [(one.problem.answer, one.answer) for one, is_one in zip(responses, comparable, strict=True) if is_one]
        by_rules = iter(self._rules.verify(pairs))
        compared = []
        for one, is_one in zip(judged, comparable, strict=True):
            rules = next(by_rules) if is_one else None
            verified = rules is not None and rules.failure is None
            compared.append(Judgment(one.verdict, one.reason, rules.correct if verified else None))
        return compared

    def _count(self, judged: Sequence[Judgment], replies: Replies) -> None:
        report = self.report
        report.replies += replies.received
        report.prompt_tokens += replies.prompt_tokens
        report.completion_tokens += replies.completion_tokens
        report.judged += sum(one.verdict is not None for one in judged)
        report.abstained += Counter(one.reason for one in judged if one.reason is not None)
        report.agreement += Counter((one.verdict, one.rules) for one in judged if one.rules is not None)


class JudgeScorer:
    """Scores responses by a judge's verdicts. A response that did not finish, or has no answer, is wrong, and the
    reward is 1 exactly where ``answer`` is the problem's."""

    def __init__(self, answers: AnswerFormat, judge: Judge | None) -> None:
        """judge: None on the ranks that do not score."""
        self._answers = answers
        self._judge = judge

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
        """A judge's own limits are of each request; those of the rules are of a collection."""
        self._judge.begin()

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order.

        Raises PartlyGenerated, with those that need no verdict or have one, where the run gave up on the judge, and
        ValueError for a rollout of an unknown problem.
        """
        responses = read_responses(rollouts, problems, self._answers)
        asked = [one for one in responses if one.answer is not None and len(one.answer) <= LONGEST_ANSWER]
        judged, stopped = self._judge.verdicts(asked)
        judgments = dict(zip(map(id, asked), judged, strict=True))
        scored = [self._scored(response, judgments.get(id(response))) for response in responses]
        if stopped is not None:
            raise PartlyGenerated(stopped, [one for one in scored if one.has_verdict])
        return scored

    def _scored(self, response: Response, judged: Judgment | None) -> ScoredRollout:
        """judged: None where no verdict is needed."""
        answer, problem = response.answer, response.problem
        if answer is None:
            return response.scored(0.0, None, response.why_no_answer)
        if judged is None:
            return response.scored(0.0, f"{answer[:LONGEST_ANSWER]}...", TOO_LONG)
        if judged.verdict:
            return response.scored(1.0, problem.answer, CORRECT + _rules_suffix(judged))
        form = canonical_number(answer) or clean_answer(answer)
        own = form if form != problem.answer else f"{form} (not judged correct)"
        if judged.verdict is None:
            return response.scored(0.0, own, f"{ABSTAINED}{judged.reason or 'it was not asked'}")
        reason = f"final answer {own}, expected {problem.answer}, by the judge{_rules_suffix(judged)}"
        return response.scored(0.0, own, reason)


def _rules_suffix(judged: Judgment) -> str:
    if judged.rules is None:
        return ""
    return RULES_AGREE if judged.rules == judged.verdict else RULES_DISAGREE
