"""Rewards by mathematical equivalence: reward 1 where math-verify finds the final answer equal to the problem's.

Votes compare strings, so each answer gets a canonical form (``equivalence.canonical``), which does not depend on the
problem's answer: a vote at test time does not know that. Comparing the n answers of a problem pairwise would take n^2
comparisons and is not transitive; a canonical form depends on no other answer, on no order, and not on how a collection
is split into parts. Its price: two answers that only an identity beyond expansion makes equal count as two.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.data.answers import LONGEST_ANSWER, AnswerFormat, canonical_number, clean_answer, simple_fraction
from nemo_edo.data.benchmarks import MATH, TEXT
from nemo_edo.data.problems import BadRow, LoadedProblems, without_bad_rows
from nemo_edo.rewards import workers
from nemo_edo.rewards.verifier import CORRECT, read_responses
from nemo_edo.rewards.workers import Limits, TaskFailure, WorkerPool
from nemo_edo.types import UNVERIFIED, Problem, Rollout, ScoredRollout

TIMED_OUT = f"{UNVERIFIED}{workers.TIMED_OUT.reason}"
TOO_LONG = f"{UNVERIFIED}refused an answer above {LONGEST_ANSWER} characters"
_EQUIVALENCE = "nemo_edo.rewards.equivalence"
"""Called by import path: only workers import it."""


@dataclass(frozen=True)
class Verdict:
    correct: bool
    answer: str
    """The answer's canonical form, or its text where finding that failed."""
    failure: str | None = None
    """Why the answer could not be verified."""


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
        good: list[Problem] = []
        bad: list[BadRow] = []
        for problem in problems:
            if problem.answer_kind == TEXT:
                reason = f"the answer is prose, which cannot be verified ({_shortened(problem.answer)})"
            elif len(problem.answer) > LONGEST_ANSWER:
                reason = f"the answer has {len(problem.answer)} characters; expected {LONGEST_ANSWER} at most"
            elif readable.get(problem.answer, True) is not True:
                reason = f"the answer cannot be parsed: {_shortened(problem.answer)}; expected LaTeX or words"
            else:
                good.append(problem)
                continue
            bad.append(BadRow(problem.source, reason))
        return LoadedProblems(without_bad_rows(path, good, bad, on_bad_rows).problems, [*loaded.skipped, *bad])

    def _run(self, function: str, arguments: Sequence[tuple]) -> list[Any]:
        """A task whose worker died is tried once more: the system may have killed it, short of memory, which must not
        cost an answer its reward."""
        results = self._pool.run(f"{_EQUIVALENCE}:{function}", arguments)
        died = [place for place, result in enumerate(results) if getattr(result, "exit_status", None) is not None]
        again = self._pool.run(f"{_EQUIVALENCE}:{function}", [arguments[place] for place in died])
        for place, result in zip(died, again, strict=True):
            results[place] = workers.CRASHED if getattr(result, "exit_status", None) is not None else result
        return results


class MathScorer:
    """Scores responses by a verifier's verdicts. As in ``ExactAnswerScorer``, a response that did not finish has reward
    0."""

    def __init__(self, answers: AnswerFormat, verifier: MathVerifier) -> None:
        self._answers = answers
        self._verifier = verifier

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
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
