"""One of several responses: votes over their final answers (self-consistency, Wang et al. 2023), and best-of-N, the
candidate with the highest reward-model score (Stiennon et al. 2020; Cobbe et al. 2021).

None is an abstention: it has no vote. Equal answers are one answer, so they come in canonical form; or the caller says
which answers mean the same: with ``equivalent(representative, answer) -> bool`` (a mathematical comparison, say) an
answer joins the first class whose representative it is equivalent to, or starts one. The representative is the
class's first member, and it is what a vote returns. Where the relation is not transitive, classes depend on the order
of the answers; where it does not relate an answer to itself, repetitions of that answer stay apart.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

STEP_AGGREGATIONS = ("last", "min", "product", "mean")
Answer = TypeVar("Answer")
Candidate = TypeVar("Candidate")
Equivalence = Callable[[Answer, Answer], bool]


def majority_vote(answers: Sequence[Answer | None], *, equivalent: Equivalence | None = None) -> Answer | None:
    """The most frequent answer, the first seen among equals; None if all abstain. Answers must be hashable, unless
    ``equivalent`` compares them."""
    winner, _ = max(vote_counts(answers, equivalent=equivalent), key=lambda item: item[1], default=(None, 0))
    return winner


def vote_counts(answers: Sequence[Answer | None], *, equivalent: Equivalence | None = None) -> list[tuple[Answer, int]]:
    """(answer, votes) of each class, in order of first appearance; the votes add up to the answers that are not None.
    Answers must be hashable, unless ``equivalent`` compares them."""
    return [(answer, len(members)) for answer, members in _classes(answers, equivalent)]


def weighted_vote(
    answers: Sequence[Answer | None], weights: Sequence[float], *, equivalent: Equivalence | None = None
) -> Answer | None:
    """The answer with the largest total weight, the first seen among equals; None if all abstain.

    With a reward model's scores as weights it is weighted best-of-N (Li et al. 2023, "Making language models better
    reasoners with step-aware verifier"). Answers must be hashable, unless ``equivalent`` compares them.
    Raises ValueError if there is not one weight for each answer, or a weight is negative or not finite.
    """
    if len(answers) != len(weights):
        raise ValueError(f"{len(weights)} weights for {len(answers)} answers, expected one for each")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights are {list(weights)}, expected finite numbers of at least 0")
    classes = _classes(answers, equivalent)
    # fsum rounds once, so that the order of the answers cannot make or break a tie.
    totals = [(answer, math.fsum(weights[i] for i in members)) for answer, members in classes]
    winner, _ = max(totals, key=lambda item: item[1], default=(None, 0))
    return winner


def _classes(answers: Sequence[Answer | None], equivalent: Equivalence | None) -> list[tuple[Answer, list[int]]]:
    """Each class's first answer and the positions of its members, classes and members in order of appearance."""
    present = [(i, answer) for i, answer in enumerate(answers) if answer is not None]
    if equivalent is None:
        by_answer: dict[Answer, list[int]] = {}
        for i, answer in present:
            by_answer.setdefault(answer, []).append(i)
        return list(by_answer.items())
    classes: list[tuple[Answer, list[int]]] = []
    for i, answer in present:
        same = (members for first, members in classes if equivalent(first, answer))
        members = next(same, None)
        if members is None:
            classes.append((answer, [i]))
        else:
            members.append(i)
    return classes


def best_of_n(
    candidates: Sequence[Candidate], scores: Sequence[float | Sequence[float]], *, aggregation: str | None = None
) -> Candidate:
    """argmax over the N candidates of their score, the first among equals; the only one where N = 1.

    Only the order of the scores matters: a strictly increasing transform keeps the choice. To add up the scores of
    candidates with the same answer instead (weighted best-of-N), see ``weighted_vote``.

    scores: a number for each candidate; or, with ``aggregation``, the scores of each candidate's steps, made one
    number by ``aggregate_steps`` ("last" is the paper's).
    Raises ValueError for no candidates, not exactly one score for each, and, with the index, for a score that is not a
    finite number or that ``aggregate_steps`` refuses.
    """
    if len(candidates) == 0:
        raise ValueError("candidates is empty, expected at least one")
    if len(scores) != len(candidates):
        raise ValueError(f"{len(scores)} scores for {len(candidates)} candidates, expected one for each")
    totals = []
    for index, score in enumerate(scores):
        if (np.ndim(score) == 0) != (aggregation is None):
            expected = "a number, or an aggregation of step scores" if aggregation is None else "its steps' scores"
            raise ValueError(f"scores[{index}] is {score!r}, expected {expected}")
        try:  # a number is the score of an only step
            totals.append(aggregate_steps(np.atleast_1d(score).tolist(), aggregation or "last"))
        except ValueError as error:
            raise ValueError(f"scores[{index}]: {error}") from error
    return candidates[max(range(len(totals)), key=totals.__getitem__)]


def aggregate_steps(step_scores: Sequence[float], how: str) -> float:
    """One score for a candidate from the process-reward-model scores of its steps (Lightman et al. 2024, appendix).

    | how       | score                                                                                 |
    |-----------|---------------------------------------------------------------------------------------|
    | "last"    | of the final step: the paper's best-of-N                                              |
    | "min"     | of the worst step                                                                     |
    | "product" | of all steps, the probability that every step is right; scores must be in [0, 1]      |
    | "mean"    | sum over steps / number of steps                                                      |

    A product below about 1e-308 loses digits and then is 0.0: beyond some hundreds of poor steps, use another one.
    Raises ValueError for no steps, a score that is not finite, an unknown ``how``, or one outside [0, 1] in a product.
    """
    if how not in STEP_AGGREGATIONS:
        raise ValueError(f"how is {how!r}, expected one of {', '.join(STEP_AGGREGATIONS)}")
    scores = [float(score) for score in step_scores]
    if not scores or not all(map(math.isfinite, scores)):
        raise ValueError(f"step_scores are {scores}, expected at least one, all finite")
    if how == "last":
        return scores[-1]
    if how == "min":
        return min(scores)
    if how == "mean":
        return math.fsum(scores) / len(scores)
    if not all(0 <= score <= 1 for score in scores):
        raise ValueError(f"step_scores are {scores}, expected numbers in [0, 1] for a product")
    return math.prod(scores)
