"""Mistakes of the warm-up's solutions: what makes its policy wrong in a known way, with room to improve.

Some facts ("weak" ones, such as 3 + 5) are mostly wrong, each always in the same way: a greedy answer has them wrong,
too, and only sampling finds the right result. Every other step is wrong now and then, at random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mistakes:
    """Which steps are wrong, and how."""

    task: str
    """Tasks with the same seed have different weak facts."""
    seed: int
    weak_fact_share: float
    """Share of the facts that are weak."""
    weak_fact_accuracy: float
    """How often a weak fact is right."""
    step_noise: float
    """Share of the other steps that are wrong."""

    def is_weak(self, fact: str) -> bool:
        return self._rng("fact", fact).random() < self.weak_fact_share

    def misconception(self, fact: str, wrong: Sequence[int]) -> int:
        """The one of ``wrong`` that a weak fact gives whenever it is wrong."""
        return self._rng("misconception", fact).choice(wrong)

    def stated(self, fact: str, right: int, wrong: Sequence[int], rng: random.Random) -> int:
        """The result of a step that uses the fact: ``right``, or one of ``wrong``."""
        if self.is_weak(fact):
            return right if rng.random() < self.weak_fact_accuracy else self.misconception(fact, wrong)
        return right if rng.random() < 1 - self.step_noise else rng.choice(wrong)

    def _rng(self, what: str, fact: str) -> random.Random:
        return random.Random(f"{self.task} {what} {self.seed} {fact}")
