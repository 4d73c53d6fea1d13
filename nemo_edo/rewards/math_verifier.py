"""Rewards by mathematical equivalence: reward 1 where math-verify holds the final answer to mean the problem's.

Votes count answers that are equal, so answers that mean the same have to be the same string. Each answer gets a
canonical form of its own: the problem's answer where it is right, else ``equivalence.canonical``. Pairwise comparison
would need all answers of a problem at once, n^2 of them, and is not transitive; a form is found once, whatever the
other answers are, and does not depend on their order or on how a collection is cut into parts. Its price: two wrong
answers that only an identity beyond expansion makes equal count as two, which can cost a wrong answer its majority.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.data.answers import LONGEST_ANSWER, AnswerFormat, canonical_number, clean_answer, simple_fraction
from nemo_edo.data.benchmarks import MATH, TEXT
from nemo_edo.data.problems import BadRow, LoadedProblems, ProblemFileError, report_bad_rows
from nemo_edo.rewards.verifier import CORRECT, MISSING, UNFINISHED, is_well_formed, with_problems
from nemo_edo.rewards.workers import Ended, WorkerPool
from nemo_edo.types import UNVERIFIED, Problem, Rollout, ScoredRollout

TOO_LONG = f"{UNVERIFIED}refused an answer above {LONGEST_ANSWER} characters"
_REMEMBERED = 100_000
"""Pairs whose verdict is kept: evaluations ask for the same ones again and again."""


@dataclass(frozen=True)
class Verdict:
    right: bool
    answer: str
    """The problem's where it is right, else the answer's canonical form, or its text where none was found in time."""
    trouble: str | None = None
    """Why it could not be verified, in words."""


class MathVerifier:
    """Compares answers in worker processes; each different pair once."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._known: dict[tuple[str, str], Verdict] = {}
        self.troubles: Counter[str] = Counter()
        """How many answers could not be verified, by what stopped it."""

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """A verdict for each (problem's answer, given answer), in order. An answer that costs more than the limits of
        the pool, or is too long to be one, is wrong."""
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        verdicts = {pair: _at_a_glance(*pair) for pair in new}
        hard = [pair for pair in new if verdicts[pair] is None]
        for (gold, answer), result in zip(hard, self._pool.run("compare", hard), strict=True):
            verdicts[gold, answer] = _verdict(gold, answer, result)
        self._known |= verdicts
        found = [self._known[pair] for pair in pairs]
        troubles = Counter(verdict.trouble for verdict in found if verdict.trouble is not None)
        self.troubles += troubles
        if troubles:
            named = ", ".join(f"{trouble}: {count}" for trouble, count in troubles.most_common())
            warnings.warn(f"answers that could not be verified and count as wrong: {named}", stacklevel=2)
        return found

    def unreadable(self, problems: Sequence[Problem]) -> list[BadRow]:
        """The problems whose answers cannot be verified."""
        rows = [
            BadRow(problem.source, f"the answer is prose, which rules cannot verify ({_shortened(problem.answer)})")
            for problem in problems
            if problem.answer_kind == TEXT
        ]
        asked = [problem for problem in problems if problem.answer_kind == MATH]
        asked = [problem for problem in asked if canonical_number(problem.answer) is None]
        answers = list(dict.fromkeys(problem.answer for problem in asked))
        readable = dict(zip(answers, self._pool.run("parses", [(answer,) for answer in answers]), strict=True))
        rows += [
            BadRow(
                problem.source, f"the answer cannot be parsed: {_shortened(problem.answer)}; expected LaTeX or words"
            )
            for problem in asked
            if readable[problem.answer] is not True
        ]
        return rows


class MathScorer:
    """Scores responses by a verifier's verdicts. A response that did not finish is never right, as in
    ``ExactAnswerScorer``, and the reward is 1 exactly where ``answer`` is the problem's.

    ``verify``: ``MathVerifier.verify``, or what has one process ask it for all: were a time limit met on one rank
    alone, ranks would train on different rewards.
    """

    def __init__(self, answers: AnswerFormat, verify: Callable[[Sequence[tuple[str, str]]], Sequence[Verdict]]) -> None:
        self._answers = answers
        self._verify = verify

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order. Raises ValueError for a rollout of an unknown problem."""
        paired = with_problems(rollouts, problems)
        stated = [self._answers.extract(rollout.text) if rollout.finished else None for rollout in rollouts]
        asked = [(p.answer, answer) for (_, p), answer in zip(paired, stated, strict=True) if answer is not None]
        verdicts = iter(self._verify(asked))
        scored = []
        for (rollout, problem), answer in zip(paired, stated, strict=True):
            verdict = next(verdicts) if answer is not None else None
            well_formed = is_well_formed(rollout, self._answers)
            reward, reason = float(verdict is not None and verdict.right), _reason(rollout, problem, verdict)
            scored.append(ScoredRollout(rollout, reward, verdict.answer if verdict else None, well_formed, reason))
        return scored


def require_verifiable(path: Path, loaded: LoadedProblems, bad: list[BadRow], *, on_bad_rows: str) -> LoadedProblems:
    """A file's problems without the ``unreadable`` ones, which are bad rows: an error, or skipped.

    Raises ProblemFileError as ``load_problems`` does.
    """
    sources = {row.source for row in bad}
    good = [problem for problem in loaded.problems if problem.source not in sources]
    if bad and (on_bad_rows == "error" or not good):
        raise ProblemFileError(report_bad_rows(path, bad, num_good=len(good)))
    return LoadedProblems(good, [*loaded.skipped, *bad])


def _at_a_glance(gold: str, answer: str) -> Verdict | None:
    """What needs no parser: equal texts, numbers and fractions, texts that are too long. None: ask a worker."""
    if len(answer) > LONGEST_ANSWER:
        return Verdict(False, answer[:LONGEST_ANSWER] + "...", TOO_LONG)
    if clean_answer(gold) == clean_answer(answer):
        return Verdict(True, gold)
    meant, given = simple_fraction(gold), simple_fraction(answer)
    if meant is None or given is None:
        return None
    if meant == given:
        return Verdict(True, gold)
    exact = "." not in gold + answer  # a decimal may stand for what it rounds
    return Verdict(False, str(given)) if exact else None


def _verdict(gold: str, answer: str, result: tuple[bool, str] | Ended) -> Verdict:
    if isinstance(result, Ended):
        return Verdict(False, clean_answer(answer), f"{UNVERIFIED}{result.value}")
    right, form = result
    return Verdict(right, gold if right else form)


def _reason(rollout: Rollout, problem: Problem, verdict: Verdict | None) -> str:
    if not rollout.finished:
        return UNFINISHED
    if verdict is None:
        return MISSING
    if verdict.right:
        return CORRECT
    return verdict.trouble or f"final answer {_shortened(verdict.answer)}, expected {problem.answer}"


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "..."
