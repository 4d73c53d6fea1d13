"""Pairs of a success and a failure among the responses to the same prompt, for iterative DPO."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import gcd, lcm

from nemo_edo.types import PreferencePair, ScoredRollout


def preference_pairs(group: Sequence[ScoredRollout], count: int, seed: int | str) -> list[PreferencePair]:
    """At most ``count`` pairs from the responses to one prompt, iterating over both sets in an order of the seed.

    Both sets are iterated in step, each starting over at its end, so that every response is used before one is used
    twice (in the larger set). No pair occurs twice. Empty where a set is empty.
    Raises ValueError for responses to several prompts.
    """
    prompts = sorted({item.rollout.problem_id for item in group})
    if len(prompts) > 1:
        raise ValueError(f"a group has responses to {len(prompts)} prompts ({prompts[0]}, {prompts[1]}), expected one")
    order = random.Random(f"pairs {seed}").sample(list(group), len(group))
    chosen = [item for item in order if item.success]
    rejected = [item for item in order if not item.success]
    if not chosen or not rejected:
        return []
    # After lcm steps the walk would repeat itself; shifted by one it meets new pairs, and gcd shifts meet them all.
    steps = lcm(len(chosen), len(rejected))
    walk = [(k, k + shift) for shift in range(gcd(len(chosen), len(rejected))) for k in range(steps)]
    return [PreferencePair(chosen[i % len(chosen)], rejected[j % len(rejected)]) for i, j in walk[:count]]
