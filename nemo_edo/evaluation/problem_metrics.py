"""The metrics of one problem's responses, whether they were just generated or read back from a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from nemo_edo.evaluation.results import NOTHING, Sums
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n


def plain_metrics(
    each: int,
    greedy: float | None,
    tokens: Sequence[Any],
    answers: Sequence[Hashable | None],
    *,
    rewards_N: np.ndarray,
    successes_N: np.ndarray,
    has_verdict_N: np.ndarray,
    well_formed_N: np.ndarray,
) -> Sums:
    """accuracy, reward, diversity, form and length of N sampled responses to a problem.

    What is measured among ``each`` of them is averaged over the N / ``each`` sets. Verdicts are counted where a judge
    did not abstain (``has_verdict_N``). greedy: whether the greedy response is a success; None: none was generated,
    NaN: it has no verdict. tokens: the token ids of each response.
    """
    size, verdicts = len(rewards_N), float(has_verdict_N.sum())

    def over_sets(values: Sequence[Any], measure: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
        sets = [values[start : start + each] for start in range(0, size, each)]
        return sum(float(measure(one)) for one in sets) / len(sets), 1.0

    of_greedy: Sums = {}
    if greedy is not None:
        of_greedy = {"greedy_accuracy": NOTHING if np.isnan(greedy) else (float(greedy), 1.0)}
    abstained = size - verdicts + (greedy is not None and bool(np.isnan(greedy)))
    return {
        **of_greedy,
        "accuracy": (float(successes_N[has_verdict_N].sum()), verdicts),
        "reward": (float(rewards_N[has_verdict_N].sum()), verdicts),
        **{f"distinct_{n}": over_sets(tokens, lambda one, n=n: distinct_n(one, n)) for n in range(1, 5)},
        "distinct_answers": over_sets(answers, distinct_answers),
        "answer_entropy": over_sets(answers, answer_entropy),
        "well_formed": (float(well_formed_N.sum()), float(size)),
        "response_length": (float(sum(map(len, tokens))), float(size)),
        "abstained": (float(abstained), float(size + len(of_greedy))),
    }
