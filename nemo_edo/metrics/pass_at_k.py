"""Expected results of k responses, estimated from more of them: pass@k, and the majority vote's score."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

import numpy as np

from nemo_edo.metrics.intervals import whole_number

EXACT_WORK = 1_000_000
"""n * k^2 up to which majority_at_k is exact: a third of a second at worst, milliseconds where answers agree."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses is correct: 1 - C(n-c, k) / C(n, k).

    n = num_samples, c = num_correct (Chen et al. 2021, eq. 1). The quotient of exact integers, rounded once, so it
    never falls with k or c.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n, all of them integers.
    """
    num_samples = whole_number("num_samples", num_samples, least=0)
    num_correct = whole_number("num_correct", num_correct)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct is {num_correct}, expected 0 to num_samples = {num_samples}")
    k = _check_k(k, num_samples)
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def expected_vote_score(answers: Sequence[Hashable | None], reference: Hashable) -> float:
    """Probability that the majority vote gives the reference when ties are broken at random.

    None is an abstention; 0.0 where all abstain. Raises ValueError if the reference is None.
    """
    if reference is None:
        raise ValueError("reference is None, which means an abstention; expected an answer")
    return vote_success(answers, [answer == reference for answer in answers])


def vote_success(answers: Sequence[Hashable | None], successes: Sequence[bool]) -> float:
    """Probability that the majority vote over the answers is right, ties broken at random.

    The verdicts choose no winner: an answer that wins counts with the share of the responses that state it which are
    successes, as if the vote returned one of them. None is an abstention; 0.0 where all abstain.
    """
    stated = Counter(answer for answer in answers if answer is not None)
    most = max(stated.values(), default=0)
    right = sum(bool(is_right) for answer, is_right in zip(answers, successes, strict=True) if stated[answer] == most)
    return right / sum(count for count in stated.values() if count == most) if most else 0.0


def majority_at_k(
    answers: Sequence[Hashable | None], reference: Hashable, k: int, *, draws: int = 2000, seed: int = 0
) -> float:
    """Expected score of the majority vote over k of the answers, sampled without replacement, ties broken at random.

    None is an abstention: it can be sampled but has no vote. Where k = n = len(answers) or n * k^2 <= 1,000,000 (so for
    n = 100 always) the result is exact, the mean of ``expected_vote_score`` over all subsets of k; otherwise a Monte
    Carlo estimate from ``draws`` subsets, with a standard error of at most 0.5 / sqrt(draws), fixed by ``seed``.
    Raises ValueError unless 1 <= k <= n and draws >= 1, and if the reference is None.
    """
    k, draws = _check_k(k, len(answers)), whole_number("draws", draws, least=1)
    counts = Counter(answer for answer in answers if answer is not None)
    correct = counts.pop(reference, 0)
    if correct == 0 or k == len(answers):
        return expected_vote_score(answers, reference)  # zero, or the error for a reference of None
    others = list(counts.values())
    abstentions = len(answers) - correct - sum(others)
    if len(answers) * k**2 <= EXACT_WORK:
        return _exact_vote(correct, others, abstentions, k)
    sampled = np.random.default_rng(seed).multivariate_hypergeometric([correct, *others, abstentions], k, size=draws)
    votes = sampled[:, :-1]
    most = votes.max(axis=1)
    wins = (votes[:, 0] == most) & (most > 0)
    return float((wins / (votes == most[:, None]).sum(axis=1)).mean())


def _exact_vote(correct: int, others: Sequence[int], abstentions: int, k: int) -> float:
    """Counts the subsets of k in which the reference has v votes and no other answer more; t answers tie with it.

    ways[t][d] is the number of ways to take d responses of the strong answers, those that could reach v votes, with t
    of them at v: a product of polynomials in d, in exact integers. All other responses are free.
    """
    score = Fraction(0)
    subsets = math.comb(correct + sum(others) + abstentions, k)
    for votes in range(1, min(correct, k) + 1):
        left = k - votes
        strong = [count for count in others if count >= votes]
        ways = [np.array([1] + [0] * left, dtype=object)]
        for count in strong:
            below = np.array([math.comb(count, i) for i in range(min(votes, left + 1))], dtype=object)
            tied = math.comb(count, votes)
            fewer = [np.convolve(row, below)[: left + 1] for row in ways] + [np.zeros_like(ways[0])]
            # Times x^votes, cut to the length.
            shifted = [np.concatenate([np.zeros_like(row[:votes]), row[:-votes]]) for row in ways]
            equal = [np.zeros_like(ways[0])] + [row * tied for row in shifted]
            ways = [a + b for a, b in zip(fewer, equal, strict=True)][: left // votes + 1]  # more rows are all 0
        free = sum(others) - sum(strong) + abstentions
        ways_free = np.array([math.comb(free, left - d) for d in range(left + 1)], dtype=object)
        for ties, row in enumerate(ways):
            score += Fraction(math.comb(correct, votes) * int(row @ ways_free), ties + 1)
    return float(score / subsets)


def _check_k(k: int, num_samples: int) -> int:
    k = whole_number("k", k)
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, expected 1 to the number of samples, {num_samples}")
    return k
