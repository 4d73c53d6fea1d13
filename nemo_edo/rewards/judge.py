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
from nemo_edo.rewards.verifier import CORRECT, MISSING, UNFINISHED, is_well_formed, with_problems
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, Problem, Rollout, ScoredRollout
from nemo_edo.utils.http import ServerError

Item = tuple[Problem, str, str]
"""A problem, a final answer, and the text that states it."""
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

    def verdicts(self, items: Sequence[Item]) -> tuple[list[Judgment], str | None]:
        """A judgment of each item, in order, and why the run gave up on the judge before all were asked about (None:
        it did not)."""
        bodies: dict[str, Mapping[str, Any]] = {}
        keys = []
        for item in items:
            body = request_body(self.settings, *item)
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
            most=self.settings.max_abstained * len(items),
        )
        stopped = self._ask(replies, len(items)) if missing else None
        found = {
            key: Judgment(replies.verdicts.get(place), replies.reasons.get(place)) for place, key in enumerate(missing)
        }
        judged = self._compare_with_rules(items, [known.get(key) or found[key] for key in keys])
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

    def _compare_with_rules(self, items: Sequence[Item], judged: Sequence[Judgment]) -> list[Judgment]:
        if self._rules is None:
            return list(judged)
        comparable = [
            problem.answer_kind != TEXT and one.verdict is not None
            for (problem, _, _), one in zip(items, judged, strict=True)
        ]
        pairs = [(item[0].answer, item[1]) for item, is_one in zip(items, comparable, strict=True) if is_one]
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
        paired = with_problems(rollouts, problems)
        stated = [self._answers.extract(rollout.text) if rollout.finished else None for rollout in rollouts]
        asked = [answer is not None and len(answer) <= LONGEST_ANSWER for answer in stated]
        items = [
            (problem, answer, rollout.text)
            for (rollout, problem), answer, is_asked in zip(paired, stated, asked, strict=True)
            if is_asked
        ]
        judged, stopped = self._judge.verdicts(items)
        verdicts = iter(judged)
        scored = [
            self._scored(rollout, problem, answer, next(verdicts) if is_asked else None)
            for (rollout, problem), answer, is_asked in zip(paired, stated, asked, strict=True)
        ]
        if stopped is not None:
            raise PartlyGenerated(stopped, [one for one in scored if one.has_verdict])
        return scored

    def _scored(self, rollout: Rollout, problem: Problem, answer: str | None, judged: Judgment | None) -> ScoredRollout:
        """judged: None where no verdict is needed."""
        well_formed = is_well_formed(rollout, self._answers)
        if judged is None:
            reason = UNFINISHED if not rollout.finished else MISSING if answer is None else TOO_LONG
            kept = None if answer is None else f"{answer[:LONGEST_ANSWER]}..."
            return ScoredRollout(rollout, 0.0, kept, well_formed, reason)
        if judged.verdict:
            return ScoredRollout(rollout, 1.0, problem.answer, well_formed, CORRECT + _rules_suffix(judged))
        own = _own_form(answer, problem)
        if judged.verdict is None:
            return ScoredRollout(rollout, 0.0, own, well_formed, f"{ABSTAINED}{judged.reason or 'it was not asked'}")
        reason = f"final answer {own}, expected {problem.answer}, by the judge{_rules_suffix(judged)}"
        return ScoredRollout(rollout, 0.0, own, well_formed, reason)


def _rules_suffix(judged: Judgment) -> str:
    if judged.rules is None:
        return ""
    return RULES_AGREE if judged.rules == judged.verdict else RULES_DISAGREE


def _own_form(answer: str, problem: Problem) -> str:
    """The string that votes compare for an answer without the verdict correct: never the problem's answer."""
    form = canonical_number(answer) or clean_answer(answer)
    return form if form != problem.answer else f"{form} (not judged correct)"
