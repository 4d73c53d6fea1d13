"""Votes over the final answers of several responses (self-consistency, Wang et al. 2023).

None is an abstention: it has no vote. Equal answers are one answer, so they come in canonical form; or the caller says
which answers mean the same: with ``equivalent(representative, answer) -> bool`` (a mathematical comparison, say) an
answer joins the first class whose representative it is equivalent to, or starts one. The representative is the
class's first member, and it is what a vote returns. Where the relation is not transitive, classes depend on the order
of the answers; where it does not relate an answer to itself, repetitions of that answer stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Answer = TypeVar("Answer")
Equivalence = Callable[[Answer, Answer], bool]


def majority_vote(answers: Sequence[Answer | None], *, equivalent: Equivalence | None = None) -> Answer | None:
    """The most frequent answer, the first seen among equals; None if all abstain.

    Answers must be hashable, unless ``equivalent`` compares them.
    """
    winner, _ = max(vote_counts(answers, equivalent=equivalent), key=lambda item: item[1], default=(None, 0))
    return winner


def vote_counts(answers: Sequence[Answer | None], *, equivalent: Equivalence | None = None) -> list[tuple[Answer, int]]:
    """(answer, votes) of each class, in order of first appearance; the votes add up to the answers that are not None.

    Answers must be hashable, unless ``equivalent`` compares them.
    """
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
