"""The metrics of one problem's responses, whether they were just generated or read back from a run's folder.

Dimension: N responses to the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_edo.evaluation.results import NOTHING, Sums
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n


@dataclass(frozen=True)
class ProblemResponses:
    """The sampled responses to a problem, and whether the greedy one is a success; None: none was generated, NaN: it
    has no verdict."""

    rewards: np.ndarray
    """[N] float64."""
    successes: np.ndarray
    """[N] bool."""
    has_verdict: np.ndarray
    """[N] bool, False where a judge abstained."""
    well_formed: np.ndarray
    """[N] bool."""
    answers: Sequence[Hashable | None]
    tokens: Sequence[Any]
    """The token ids of each."""
    greedy: float | None


def plain_metrics(found: ProblemResponses, each: int) -> Sums:
    """accuracy, reward, diversity, form and length of the responses; what is measured among ``each`` of them is
    averaged over the N / ``each`` sets. Verdicts are counted where there are any."""
    size, verdicts = len(found.rewards), float(found.has_verdict.sum())
    sets = [slice(start, start + each) for start in range(0, size, each)]

    def over_sets(values: Sequence[Any], measure: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
        return sum(float(measure(values[one])) for one in sets) / len(sets), 1.0

    greedy: Sums = {}
    if found.greedy is not None:
        greedy = {"greedy_accuracy": NOTHING if np.isnan(found.greedy) else (float(found.greedy), 1.0)}
    asked = size + len(greedy)
    abstained = size - verdicts + (found.greedy is not None and bool(np.isnan(found.greedy)))
    return {
        **greedy,
        "accuracy": (float(found.successes[found.has_verdict].sum()), verdicts),
        "reward": (float(found.rewards[found.has_verdict].sum()), verdicts),
        "distinct_4": over_sets(found.tokens, distinct_n),
        "distinct_answers": over_sets(found.answers, distinct_answers),
        "answer_entropy": over_sets(found.answers, answer_entropy),
        "well_formed": (float(found.well_formed.sum()), float(size)),
        "response_length": (float(sum(map(len, found.tokens))), float(size)),
        "abstained": (float(abstained), float(asked)),
    }
