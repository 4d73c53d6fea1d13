"""Expected results of k responses, estimated from more of them: pass@k, and the majority vote's score."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses is correct: 1 - C(n-c, k) / C(n, k).

    n = num_samples, c = num_correct (Chen et al. 2021, eq. 1). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct is {num_correct}, expected 0 to num_samples = {num_samples}")
    _check_k(k, num_samples)
    if num_samples - num_correct < k:  # any k include a correct one, and below some factors would be negative
        return 1.0
    # The quotient as a product of c factors in [0, 1]: no large binomial is ever formed.
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def expected_vote_score(answers: Sequence[Hashable | None], reference: Hashable) -> float:
    """Probability that the majority vote gives the reference when ties are broken at random.

    None is an abstention; 0.0 where all abstain. Raises ValueError if the reference is None.
    """
    if reference is None:
        raise ValueError("reference is None, which stands for an abstention; expected an answer")
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    tied = sum(count == most for count in votes.values())
    return 1.0 / tied if most and votes[reference] == most else 0.0


def majority_at_k(
    answers: Sequence[Hashable | None], reference: Hashable, k: int, *, draws: int = 2000, seed: int = 0
) -> float:
    """Expected score of the majority vote over k of the answers, drawn without replacement, ties broken at random.

    None is an abstention: it can be drawn but has no vote. Exact for k = 1 and k = len(answers); between them a Monte
    Carlo estimate from ``draws`` subsets, with a standard error of at most 0.5 / sqrt(draws), fixed by ``seed``.
    Raises ValueError unless 1 <= k <= len(answers), and if the reference is None.
    """
    _check_k(k, len(answers))
    if k == len(answers):
        return expected_vote_score(answers, reference)
    if k == 1:
        return sum(expected_vote_score([answer], reference) for answer in answers) / len(answers)
    counts = Counter(answer for answer in answers if answer is not None)
    correct = counts.pop(reference, 0)
    if correct == 0:
        return expected_vote_score(answers, reference)  # zero, or the error for a reference of None
    abstentions = len(answers) - correct - counts.total()
    population = [correct, *counts.values(), abstentions]
    drawn = np.random.default_rng(seed).multivariate_hypergeometric(population, k, size=draws)[:, :-1]
    most = drawn.max(axis=1)
    wins = (drawn[:, 0] == most) & (most > 0)
    return float((wins / (drawn == most[:, None]).sum(axis=1)).mean())


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, expected 1 to the number of samples, {num_samples}")
