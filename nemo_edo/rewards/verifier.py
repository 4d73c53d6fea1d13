"""What all verifiers share, and the exact one: reward 1 for the correct final answer, 0 for any other."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_edo.data.answers import HASHES, AnswerFormat, canonical_number
from nemo_edo.types import Problem, Rollout, ScoredRollout

UNFINISHED, MISSING, CORRECT = "did not finish", "no final answer", "correct"


class ExactAnswerScorer:
    """Compares final answers in canonical form (exact match, as the paper scores GSM8K).

    A response that did not finish has no answer and reward 0: its last number may be cut (``#### 1`` of ``#### 12``),
    and rewarding it would teach the policy not to stop. So the reward is 1 exactly where ``answer`` is the problem's,
    and a vote over one response agrees with its reward. Text around the answer line costs no reward; ``well_formed``
    reports it. Where the problem's answer is a number, only numbers are answers.
    """

    def __init__(self, answers: AnswerFormat = HASHES) -> None:
        self._answers = answers

    def begin(self, scored: Sequence[ScoredRollout]) -> None:
        """Nothing that is scored here takes time."""

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order. Raises ValueError for a rollout of an unknown problem."""
        return [self._score(rollout, problem) for rollout, problem in with_problems(rollouts, problems)]

    def _score(self, rollout: Rollout, problem: Problem) -> ScoredRollout:
        stated = self._answers.extract(rollout.text) if rollout.finished else None
        number = None if stated is None else canonical_number(stated)
        answer = number if problem.answer_kind == "number" else number or stated
        expected = canonical_number(problem.answer) or problem.answer
        if not rollout.finished:
            reason = UNFINISHED
        elif answer is None:
            reason = MISSING
        else:
            reason = CORRECT if answer == expected else f"final answer {answer}, expected {expected}"
        correct = answer is not None and answer == expected
        answer = problem.answer if correct else answer
        return ScoredRollout(rollout, float(correct), answer, is_well_formed(rollout, self._answers), reason)


def with_problems(rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[tuple[Rollout, Problem]]:
    """Each rollout with its problem. Raises ValueError for a rollout of an unknown problem."""
    known = {problem.id: problem for problem in problems}
    unknown = sorted({rollout.problem_id for rollout in rollouts} - known.keys())
    if unknown:
        raise ValueError(f"rollouts of {len(unknown)} unknown problems, the first {unknown[0]!r}")
    return [(rollout, known[rollout.problem_id]) for rollout in rollouts]


def is_well_formed(rollout: Rollout, answers: AnswerFormat) -> bool:
    return rollout.finished and answers.is_well_formed(rollout.text)
