"""The verifier: reward 1 for the right final answer, 0 for any other (exact match, as the paper scores GSM8K)."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_edo.data.answers import final_answer, is_well_formed
from nemo_edo.types import Problem, Rollout, ScoredRollout


class ExactAnswerScorer:
    """Compares final answers in canonical form.

    A response that did not finish is never right and has no answer: the number at its end may be cut (``#### 1`` of
    ``#### 12``), and rewarding it would teach the policy not to stop. So the reward is 1 exactly where ``answer`` is
    the problem's, and a vote over one response agrees with its reward. Text around the answer line costs no reward;
    ``well_formed`` reports it.
    """

    def score(self, rollouts: Sequence[Rollout], problems: Sequence[Problem]) -> list[ScoredRollout]:
        """One scored rollout for each rollout, in order. Raises ValueError for a rollout of an unknown problem."""
        expected = {problem.id: problem.answer for problem in problems}
        unknown = sorted({rollout.problem_id for rollout in rollouts} - expected.keys())
        if unknown:
            raise ValueError(f"rollouts of {len(unknown)} problems that were not given, the first {unknown[0]!r}")
        return [_score(rollout, expected[rollout.problem_id]) for rollout in rollouts]


def _score(rollout: Rollout, expected: str) -> ScoredRollout:
    answer = final_answer(rollout.text) if rollout.finished else None
    if not rollout.finished:
        reason = "did not finish"
    elif answer is None:
        reason = "no final answer"
    elif answer != expected:
        reason = f"final answer {answer}, expected {expected}"
    else:
        reason = "correct"
    well_formed = rollout.finished and is_well_formed(rollout.text)
    return ScoredRollout(rollout, float(answer == expected), answer, well_formed, reason)
