"""Credit for rare correct solutions: how much of a group took the same solution path. Ours, not the paper's.

The task defines what "the same path" means (``PathFunction``): a parser where steps can be parsed, otherwise clusters
of similar texts. Two uses of the resulting shares: ``novelty_advantages`` moves advantage from repeated to rare correct
solutions; as ``weights`` of ``exploration_term`` they push down repeated paths alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from nemo_edo.losses.advantages import GroupIds, floating_type, read_groups, require_values
from nemo_edo.losses.checks import check_coefficient


class PathFunction(Protocol):
    """Which of a group's responses took the same solution path."""

    def __call__(self, question: str, texts: Sequence[str]) -> Sequence[Hashable | None]:
        """One label for each text, in order: equal for the same path, None where no path can be read."""


def each_path(parse: Callable[..., Hashable | None]) -> PathFunction:
    """A path function from a parser of one response, ``parse(question=..., text=...)``."""

    def paths(question: str, texts: Sequence[str]) -> list[Hashable | None]:
        return [parse(question=question, text=text) for text in texts]

    return paths


@dataclass(frozen=True)
class NgramPaths:
    """A path function for texts that no parser reads: similar wording counts as the same path.

    Two texts are linked if the Jaccard overlap |A & B| / |A | B| of their sets of word n-grams is at least the
    threshold; a path is a connected component of the links (single linkage), so the order of the texts does not
    matter. Words are separated by blanks. A text of fewer than n words is one gram; a blank one has no path.
    A path's label is its first text in alphabetical order.
    """

    n: int = 4
    """Words in a gram, at least 1."""
    threshold: float = 0.5
    """In (0, 1]; 1 links only texts with the same grams."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}, expected at least 1")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}, expected a number in (0, 1]")

    def __call__(self, question: str, texts: Sequence[str]) -> list[str | None]:
        distinct = sorted({text for text in texts if text.split()})
        grams = [self._grams(text) for text in distinct]
        label = list(distinct)
        for i, j in combinations(range(len(distinct)), 2):
            if label[i] != label[j] and len(grams[i] & grams[j]) / len(grams[i] | grams[j]) >= self.threshold:
                first, second = sorted((label[i], label[j]))
                label = [first if name == second else name for name in label]
        path_of = dict(zip(distinct, label, strict=True))
        return [path_of.get(text) for text in texts]

    def _grams(self, text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[start : start + self.n]) for start in range(max(len(words) - self.n, 0) + 1)}


def redundancy_shares(
    paths: Sequence[Hashable | None], correct: Tensor | Sequence[bool], group_ids: GroupIds
) -> Tensor:
    """w_i: of the *other* correct responses in the group, the share that took the same path as this correct one; [B], 0
    for wrong responses and for a lone correct one.

    paths: [B] labels, compared within a group. Those of None count as one and the same path: a response whose path is
        unknown is not a discovery: with a separate path for each, garbled solutions would earn the most.
    correct: [B], bool or 0 and 1. group_ids: [B], as for ``group_advantages``.

    As ``exploration_term(..., weights=shares)`` these give the softer form of the novelty advantage: the term then
    lowers correct answers on repeated paths alone, more the more they are repeated.
    Raises ValueError for lengths that differ and for ``correct`` other than 0 and 1.
    """
    groups, (correct,) = read_groups(group_ids, correct=correct)
    require_values("correct", correct, (0, 1))
    labels = paths.tolist() if isinstance(paths, Tensor) else list(paths)
    if len(labels) != len(correct):
        raise ValueError(f"paths has {len(labels)} labels, but correct has {len(correct)} values")
    is_correct = (correct == 1).tolist()
    keys = list(zip(groups.of_B.tolist(), labels, strict=True))
    on_path = Counter(key for key, right in zip(keys, is_correct, strict=True) if right)
    in_group = groups.sum_G((correct == 1).long()).tolist()
    shares = [
        (on_path[key] - 1) / (in_group[key[0]] - 1) if right and in_group[key[0]] > 1 else 0.0
        for key, right in zip(keys, is_correct, strict=True)
    ]
    return torch.tensor(shares, dtype=floating_type(correct), device=correct.device)


def novelty_advantages(
    advantages: Tensor,
    shares: Tensor,
    correct: Tensor | Sequence[bool],
    group_ids: GroupIds,
    *,
    strength: float,
) -> Tensor:
    """A_i - strength * (w_i - mean of w over the group's correct responses) for correct responses; others keep A_i.

    Advantage moves from repeated to rare correct solutions, and the group's total stays what it was. Groups with no or
    one correct response, or where all correct ones are equally redundant, keep theirs bit for bit.
    advantages: [B], of any kind; the result has their type. shares: [B], w (``redundancy_shares``). correct, group_ids:
    as there. strength: units of advantage for each unit of w, at least 0.
    Raises ValueError as ``read_groups`` does, for ``correct`` other than 0 and 1, and for a strength below 0. No
    gradient.
    """
    check_coefficient("strength", strength)
    groups, (advantages, shares, correct) = read_groups(
        group_ids, advantages=advantages, shares=shares, correct=correct
    )
    require_values("correct", correct, (0, 1))
    right_B, w_B = correct == 1, shares.double()
    # Measured from the lowest share, so that the deviations of equal shares are zero and not a rounding.
    lowest_G = groups.lowest_G(torch.where(right_B, w_B, math.inf))
    above_B = torch.where(right_B, w_B - lowest_G[groups.of_B], 0.0)
    mean_G = groups.sum_G(above_B) / groups.sum_G(right_B.double()).clamp(min=1)
    deviation_B = torch.where(right_B, above_B - mean_G[groups.of_B], 0.0)
    return (advantages.double() - strength * deviation_B).to(floating_type(advantages))
