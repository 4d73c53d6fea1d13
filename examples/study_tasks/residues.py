"""Sums and products modulo a prime: merge any two of the remaining residues in each step.

question  12 + 4 + 7 + 9        12 * 4 * 7 * 9
solution  4 + 9 = 13            4 * 9 = 2
          12 + 7 = 2            12 * 7 = 16
          13 + 2 = 15           2 * 16 = 15
          #### 15               #### 15
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from examples.study_tasks.family import Item
from nemo_edo.builtin_task.arithmetic import Mistakes, derive, unordered
from nemo_edo.errors import UserError


def residues(mistakes: Mistakes, rng: random.Random, *, modulus: int = 17, operands: int = 4) -> Iterator[Item]:
    """Sums. A wrong step gives another residue. Raises UserError for a modulus or a number of operands below 2."""
    return _merged(mistakes, rng, range(modulus), sum, "+", modulus, operands)


def products(mistakes: Mistakes, rng: random.Random, *, modulus: int = 17, operands: int = 4) -> Iterator[Item]:
    """Products of residues other than 0, whose modulus should be prime: else a product can be 0."""
    return _merged(mistakes, rng, range(1, modulus), math.prod, "*", modulus, operands)


def _merged(
    mistakes: Mistakes, rng: random.Random, values: range, merge: Callable, sign: str, modulus: int, operands: int
) -> Iterator[Item]:
    for key, value in (("modulus", modulus), ("operands", operands)):
        if value < 2:
            raise UserError(f"data.source_args.{key} is {value}, expected at least 2")

    def stated(first: int, second: int) -> int:
        right = merge((first, second)) % modulus
        wrong = [value for value in values if value != right]
        return mistakes.stated(unordered(first, second), right, wrong, rng)

    while True:
        numbers = tuple(rng.choice(values) for _ in range(operands))
        yield Item(
            question=f" {sign} ".join(map(str, numbers)),
            answer=str(merge(numbers) % modulus),
            warmup=derive(numbers, stated, rng, sign),
            key=tuple(sorted(numbers)),
        )
