"""Scored responses, with a default for every field."""

from typing import Any

from nemo_edo.types import Rollout, ScoredRollout


def scored(problem: str = "train-1", sample: int = 0, ids: tuple[int, ...] = (5, 1), reward: float = 1.0, *,
           answer: str | None = "2", well_formed: bool = True, reason: str = "correct", log_prob: float = -0.5,
           **of_rollout: Any) -> ScoredRollout:
    """of_rollout: other fields of the Rollout; ``log_prob`` is that of every token."""
    fields = {"prompt_ids": (5, 6), "response_logprobs": (log_prob,) * len(ids), "text": "#### 2", "finished": True,
              "policy_version": 0, "seed": 7} | of_rollout
    rollout = Rollout(problem_id=problem, sample_index=sample, response_ids=ids, **fields)
    return ScoredRollout(rollout, reward, answer, well_formed, reason)
