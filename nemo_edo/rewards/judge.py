"""Rewards by a language model that says whether a response's final answer is equivalent to the problem's.

Verdicts are parsed strictly. Without one (an invalid reply, a server that is down or refuses requests) the judge
abstains: the response's reason says so (``types.ABSTAINED``), its reward of 0 has no meaning, and evaluations leave it
out. Above a share of abstentions the run stops and keeps the verdicts so far.

Final answers are extracted, and responses without an answer or an end are wrong, as with the verifiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_edo.config import JudgeConfig
from nemo_edo.data.answers import LONGEST_ANSWER, AnswerFormat, canonical_number, clean_answer
from nemo_edo.data.benchmarks import TEXT
from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.rewards.judge_cache import JudgeCache, request_key
from nemo_edo.rewards.judge_client import JudgeClient, Verdicts
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
    reason: str | None
    """Why it abstained; None where it was not asked, because the run gave up on it before."""
    rules: bool | None
    """The verdict of the rules, that is, of MathVerifier; None: not verifiable, or not asked."""


class Judge:
    """Asks a language model for verdicts. Equal requests are sent once, across runs."""

    def __init__(self, settings: JudgeConfig, cache: JudgeCache, rules: MathVerifier | None) -> None:
        """rules: verifies the same answers for comparison; None: no comparison. Raises UserError where the environment
        lacks the key."""
        self.settings = settings
        self.rules = rules
        self.report = JudgeReport()
        self._cache = cache
        self._client = JudgeClient(settings, cache)

    def check(self) -> None:
        """Asks for one verdict, to find a wrong URL, key or model before any work. Raises UserError where no reply
        comes; the reply needs no verdict."""
        body, report = request_body(self.settings, _EXAMPLE, "2", "#### 2"), JudgeReport()
        verdicts = Verdicts(Counter([key := request_key(body)]), most_abstained=1)
        self._client.ask({key: body}, verdicts, report)
        if not report.replies:
            reason = verdicts.reasons[key]
            raise UserError(f"the judge (rewards.judge.url {self.settings.url}) does not answer: {reason}")

    def take_report(self) -> JudgeReport:
        """The report of everything since the last call."""
        taken, self.report = self.report, JudgeReport()
        return taken

    def verdicts(self, responses: Sequence[Response]) -> tuple[list[Judgment], str | None]:
        """A judgment of each response, in order, and why the run gave up on the judge before all were asked about
        (None: it did not)."""
        settings, report = self.settings, self.report
        bodies = [request_body(settings, one.problem, one.answer, one.rollout.text) for one in responses]
        keys = [request_key(body) for body in bodies]
        asked = Verdicts(Counter(keys), settings.max_abstained * len(responses))
        asked.given = {key: known for key in set(keys) if (known := self._cache.get(key)) is not None}
        report.cached += len(asked.given)
        missing = {key: body for key, body in zip(keys, bodies, strict=True) if key not in asked.given}
        stopped = None
        try:
            self._client.ask(missing, asked, report)
        except ServerError as error:
            stopped = str(error)
        if stopped is None and asked.too_many_abstained:
            stopped = (
                f"the judge abstained on {asked.abstained} of {len(responses)} responses, and "
                f"rewards.judge.max_abstained is {settings.max_abstained:g}; most often: "
                f"{report.explained(Counter(asked.reasons.values()).most_common(1)[0][0])}"
            )
        rules = self._verify(responses, [asked.given.get(key) for key in keys])
        judged = [
            Judgment(asked.given.get(key), asked.reasons.get(key), by_rules)
            for key, by_rules in zip(keys, rules, strict=True)
        ]
        report.judged += sum(one.verdict is not None for one in judged)
        report.abstained += Counter(one.reason for one in judged if one.reason is not None)
        report.agreement += Counter((one.verdict, one.rules) for one in judged if one.rules is not None)
        return judged, stopped

    def _verify(self, responses: Sequence[Response], verdicts: Sequence[bool | None]) -> list[bool | None]:
        """The rules' verdicts on what has a judge's; None where they do not apply or fail."""
        rules: list[bool | None] = [None] * len(responses)
        if self.rules is not None:
            comparable = [
                place
                for place, (one, verdict) in enumerate(zip(responses, verdicts, strict=True))
                if one.problem.answer_kind != TEXT and verdict is not None
            ]
            pairs = [(responses[place].problem.answer, responses[place].answer) for place in comparable]
            for place, verified in zip(comparable, self.rules.verify(pairs), strict=True):
                rules[place] = verified.correct if verified.failure is None else None
        return rules


class JudgeScorer:
    """Scores responses by a judge's verdicts. A response that did not finish, or has no answer, is wrong."""

    def __init__(self, answers: AnswerFormat, judge: Judge) -> None:
        self._answers = answers
        self._judge = judge

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
        """A judge's own limits are of each request; those of the rules are of a collection."""
        if self._judge.rules is not None:
            self._judge.rules.begin(0)

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order.

        Raises PartlyGenerated, with those that need no verdict or have one, where the run gave up on the judge, and
        ValueError for a rollout of an unknown problem.
        """
        responses = read_responses(rollouts, problems, self._answers)
        asked = [one for one in responses if one.answer is not None and len(one.answer) <= LONGEST_ANSWER]
        judgments, stopped = self._judge.verdicts(asked)
        judged = iter(judgments)
        scored = []
        for response in responses:
            if response.answer is None:
                scored.append(response.scored(0.0, None, response.why_no_answer))
            elif len(response.answer) > LONGEST_ANSWER:
                scored.append(response.scored(0.0, f"{response.answer[:LONGEST_ANSWER]}...", TOO_LONG))
            else:
                scored.append(_scored(response, next(judged)))
        if stopped is not None:
            raise PartlyGenerated(stopped, [one for one in scored if one.has_verdict])
        return scored


def _scored(response: Response, judged: Judgment) -> ScoredRollout:
    answer, problem = response.answer, response.problem
    rules = ""
    if judged.rules is not None:
        rules = RULES_AGREE if judged.rules == judged.verdict else RULES_DISAGREE
    form = canonical_number(answer) or clean_answer(answer)
    if judged.verdict:
        return response.scored(1.0, form, CORRECT + rules)
    if judged.verdict is None:
        return response.scored(0.0, form, f"{ABSTAINED}{judged.reason or 'it was not asked'}")
    return response.scored(0.0, form, f"final answer {form}, expected {problem.answer}, by the judge{rules}")
