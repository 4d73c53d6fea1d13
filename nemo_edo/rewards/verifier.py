"""What all verifiers share, and the exact one: reward 1 for the correct final answer, 0 for any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_edo.data.answers import HASHES, AnswerFormat, canonical_number, stated_number
from nemo_edo.data.benchmarks import NUMBER
from nemo_edo.types import Problem, Rollout, ScoredRollout

UNFINISHED, MISSING, CORRECT = "did not finish", "no final answer", "correct"


@dataclass(frozen=True)
class Response:
    """A response to score, and its problem."""

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
    """In order. Raises ValueError for a rollout of an unknown problem."""
    known = {problem.id: problem for problem in problems}
    unknown = sorted({rollout.problem_id for rollout in rollouts} - known.keys())
    if unknown:
        raise ValueError(f"rollouts of {len(unknown)} unknown problems, the first {unknown[0]!r}")
    return [
        Response(
            rollout, known[rollout.problem_id], answers.extract(rollout.text) if rollout.finished else None,
            rollout.finished and answers.is_well_formed(rollout.text),
        )
        for rollout in rollouts
    ]  # fmt: skip


class ExactAnswerScorer:
    """Compares final answers in canonical form (exact match, as the paper scores GSM8K).

    Text around the answer line costs no reward; ``well_formed`` reports it. Where the problem's answer is a number,
    only numbers are answers, with or without a unit.
    """

    def __init__(self, answers: AnswerFormat = HASHES) -> None:
        self._answers = answers

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
        """Nothing that is scored here takes time."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        scored = []
        for response in read_responses(rollouts, problems, self._answers):
            problem, stated = response.problem, response.answer
            answer = None if stated is None else canonical_number(stated)
            if stated and answer is None:
                answer = stated_number(stated) if problem.answer_kind == NUMBER else stated
            expected = canonical_number(problem.answer) or problem.answer
            if answer is None:
                scored.append(response.scored(0.0, None, response.why_no_answer))
            elif answer == expected:
                scored.append(response.scored(1.0, answer, CORRECT))
            else:
                scored.append(response.scored(0.0, answer, f"final answer {answer}, expected {expected}"))
        return scored
