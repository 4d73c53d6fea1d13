"""Sums modulo 17: merge any two of the remaining residues in each step.

question  12 + 4 + 7 + 9
solution  4 + 9 = 13
          12 + 7 = 2
          13 + 2 = 15
          #### 15
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.study_tasks.family import Item
from nemo_edo.builtin_task.arithmetic import Mistakes, derive, unordered
from nemo_edo.errors import UserError


def residues(mistakes: Mistakes, rng: random.Random, *, modulus: int = 17, operands: int = 4) -> Iterator[Item]:
    """A wrong step gives another residue. Raises UserError for a modulus or a number of operands below 2."""
    for key, value in (("modulus", modulus), ("operands", operands)):
        if value < 2:
            raise UserError(f"data.source_args.{key} is {value}, expected at least 2")

    def stated(first: int, second: int) -> int:
        right = (first + second) % modulus
        wrong = [value for value in range(modulus) if value != right]
        return mistakes.stated(unordered(first, second), right, wrong, rng)

    while True:
        numbers = tuple(rng.randrange(modulus) for _ in range(operands))
        yield Item(
            question=" + ".join(map(str, numbers)),
            answer=str(sum(numbers) % modulus),
            warmup=derive(numbers, stated, rng),
            key=tuple(sorted(numbers)),
        )
