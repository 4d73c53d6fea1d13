"""Verifiers: reward 1 for the correct final answer, 0 for any other; exactly, or by math-verify's equivalence.

Votes compare strings, so each answer gets a canonical form (``equivalence.canonical``), which depends neither on the
problem's answer, which a vote at test time does not know, nor on other answers: comparing those pairwise would take n^2
comparisons and is not transitive. Its price: two answers that only an identity beyond expansion makes equal count as
two.
"""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.data.answers import (
    HASHES,
    LONGEST_ANSWER,
    AnswerFormat,
    canonical_number,
    clean_answer,
    simple_fraction,
    stated_number,
)
from nemo_edo.data.benchmarks import MATH, NUMBER, TEXT
from nemo_edo.data.problems import LoadedProblems, without_unusable
from nemo_edo.types import UNVERIFIED, Problem, Rollout, ScoredRollout
from nemo_edo.utils import worker_pool
from nemo_edo.utils.worker_pool import Limits, TaskFailure, WorkerPool

UNFINISHED, MISSING, CORRECT = "did not finish", "no final answer", "correct"
TIMED_OUT = f"{UNVERIFIED}{worker_pool.TIMED_OUT.reason}"
TOO_LONG = f"{UNVERIFIED}refused an answer above {LONGEST_ANSWER} characters"
_EQUIVALENCE = "nemo_edo.rewards.equivalence"  # called by import path: only workers import it


@dataclass(frozen=True)
class Response:
    rollout: Rollout
    problem: Problem
    answer: str | None
    """The final answer that it states. None without one, and where it did not finish: its last number may be cut
    (``#### 1`` of ``#### 12``), and rewarding it would teach the policy not to stop."""
    well_formed: bool

    def scored(self, reward: float, answer: str | None, reason: str, *more: Any) -> ScoredRollout:
        """answer: what the response states, in the form that votes compare; the verdict has no part in it."""
        return ScoredRollout(self.rollout, reward, answer, self.well_formed, reason, *more)

    @property
    def why_no_answer(self) -> str:
        return MISSING if self.rollout.finished else UNFINISHED


def read_responses(rollouts: Sequence[Rollout], problems: Sequence[Problem], answers: AnswerFormat) -> list[Response]:
    """The responses in order. Raises KeyError for a rollout of an unknown problem."""
    known = {problem.id: problem for problem in problems}
    return [
        Response(
            rollout, known[rollout.problem_id], answers.extract(rollout.text) if rollout.finished else None,
            rollout.finished and answers.is_well_formed(rollout.text),
        )
        for rollout in rollouts
    ]  # fmt: skip


class ExactAnswerScorer:
    """Compares final answers in canonical form (exact match, as the paper scores GSM8K), whatever text is around the
    answer line. Where the problem's answer is a number, only numbers are answers, with or without a unit."""

    def __init__(self, answers: AnswerFormat = HASHES) -> None:
        self._answers = answers

    def begin(self, scored: Sequence[ScoredRollout], expected: int) -> None:
        """Nothing that is scored here takes time."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        scored = []
        for response in read_responses(rollouts, problems, self._answers):
            problem, stated = response.problem, response.answer
            answer = None if stated is None else canonical_number(stated)
            if stated and answer is None:
                answer = stated_number(stated) if problem.answer_kind == NUMBER else stated
            expected = canonical_number(problem.answer) or problem.answer
            reason = response.why_no_answer if answer is None else f"final answer {answer}, expected {expected}"
            correct = answer == expected
            if answer is not None and canonical_number(answer) is None and len(answer) <= LONGEST_ANSWER:
                answer = clean_answer(answer)  # what votes count
                correct |= answer == clean_answer(expected)
            scored.append(response.scored(float(correct), answer, CORRECT if correct else reason))
        return scored


@dataclass(frozen=True)
class Verdict:
    correct: bool
    answer: str  # the answer's canonical form, or its text where finding that failed
    failure: str | None = None  # why the answer could not be verified


class MathVerifier:
    """Compares answers in worker processes, each distinct pair once."""

    def __init__(self, limits: Limits) -> None:
        self._pool = WorkerPool(limits, prepare=f"{_EQUIVALENCE}:warm_up")

    def begin(self, timed_out: int) -> None:
        """The budget of the pool's limits is for all that is verified from here to the next ``begin``. timed_out: how
        many distinct pairs of the same collection have timed out already."""
        self._pool.begin(timed_out)

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """A verdict for each (problem's answer, given answer), in order. An answer that exceeds the pool's limits, or
        is too long, is wrong. Warns of those that could not be verified."""
        verdicts: dict[tuple[str, str], Verdict] = {}
        hard = []
        for pair in dict.fromkeys(pairs):
            gold, answer = pair
            meant, given = simple_fraction(gold), simple_fraction(answer)
            if len(answer) > LONGEST_ANSWER:
                verdicts[pair] = Verdict(False, answer[:LONGEST_ANSWER] + "...", TOO_LONG)
            # Numbers and fractions need no parser, but a decimal may be rounded.
            elif None not in (meant, given) and (meant == given or "." not in gold + answer):
                verdicts[pair] = Verdict(meant == given, str(given))
            else:
                hard.append(pair)
        for (gold, answer), result in zip(hard, self._run("compare", hard), strict=True):
            if not isinstance(result, TaskFailure):
                verdicts[gold, answer] = Verdict(*result)
            elif (text := clean_answer(answer)) == clean_answer(gold):  # it has no canonical form, but is right
                verdicts[gold, answer] = Verdict(True, text)
            else:
                verdicts[gold, answer] = Verdict(False, text, f"{UNVERIFIED}{result.reason}")
        found = [verdicts[pair] for pair in pairs]
        failures = Counter(verdict.failure for verdict in found if verdict.failure is not None)
        if failures:
            named = ", ".join(f"{failure}: {count}" for failure, count in failures.most_common())
            warnings.warn(f"answers that could not be verified count as wrong: {named}", stacklevel=2)
        return found

    def verifiable(self, path: Path, loaded: LoadedProblems, on_bad_rows: str) -> LoadedProblems:
        """A file's problems whose own answers can be verified; the others are bad rows: an error, or skipped. Raises
        ProblemFileError as ``load_problems`` does."""
        problems = loaded.problems
        asked = list(dict.fromkeys(
            p.answer for p in problems
            if p.answer_kind == MATH and len(p.answer) <= LONGEST_ANSWER and canonical_number(p.answer) is None
        ))  # fmt: skip
        readable = dict(zip(asked, self._run("parses", [(answer,) for answer in asked]), strict=True))

        def why(problem: Problem) -> str | None:
            if problem.answer_kind == TEXT:
                return f"the answer is prose, which cannot be verified ({_shortened(problem.answer)})"
            if len(problem.answer) > LONGEST_ANSWER:
                return f"the answer has {len(problem.answer)} characters; expected {LONGEST_ANSWER} at most"
            if re.match(r"\s*[\[{]\s*['\"]", problem.answer):
                return f"the answer is a list or an object as a text ({_shortened(problem.answer)}); expected it alone"
            if readable.get(problem.answer, True) is not True:
                return f"the answer cannot be parsed: {_shortened(problem.answer)}; expected LaTeX or words"
            return None

        return without_unusable(path, loaded, on_bad_rows, why)

    def _run(self, function: str, arguments: Sequence[tuple]) -> list[Any]:
        """A task whose worker died is tried once more: the system may have killed it, short of memory."""
        results = self._pool.run(f"{_EQUIVALENCE}:{function}", arguments)
        died = [place for place, result in enumerate(results) if getattr(result, "exit_status", None) is not None]
        again = self._pool.run(f"{_EQUIVALENCE}:{function}", [arguments[place] for place in died])
        for place, result in zip(died, again, strict=True):
            results[place] = worker_pool.CRASHED if getattr(result, "exit_status", None) is not None else result
        return results


class MathScorer:
    """Scores responses by a verifier's verdicts; one that did not finish has reward 0."""

    def __init__(self, answers: AnswerFormat, verifier: MathVerifier) -> None:
        self._answers = answers
        self._verifier = verifier

    def begin(self, scored: Sequence[ScoredRollout], expected: int) -> None:
        """The verifier's budget holds for the collection, however many parts, processes and restarts it takes."""
        self._verifier.begin(len({(s.rollout.problem_id, s.answer) for s in scored if s.reason == TIMED_OUT}))

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        responses = read_responses(rollouts, problems, self._answers)
        stated = [(response.problem.answer, response.answer) for response in responses if response.answer is not None]
        verdicts = iter(self._verifier.verify(stated))
        scored = []
        for response in responses:
            if response.answer is None:
                scored.append(response.scored(0.0, None, response.why_no_answer))
            elif (verdict := next(verdicts)).correct:
                scored.append(response.scored(1.0, verdict.answer, CORRECT))
            else:
                expected = f"final answer {_shortened(verdict.answer)}, expected {response.problem.answer}"
                scored.append(response.scored(0.0, verdict.answer, verdict.failure or expected))
        return scored


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "..."
