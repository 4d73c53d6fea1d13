"""Tasks of reasoning-gym (the extra ``reasoning-gym``) with worked solutions of our own solvers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from examples.study_tasks.family import Item
from nemo_edo.builtin_task.arithmetic import Mistakes, derive, unordered
from nemo_edo.errors import UserError

CHUNK = 1024
"""Items that a data set of reasoning-gym has; its seed is the chunk's number."""
ERRORS = (-2, -1, 1, 2)
"""How far off a wrong result is."""
_QUESTION = {"chain": r": (.*) =", "gcd": r": ([0-9, ]*)\.", "lcm": r": ([0-9, ]*)$", "legs": r"if you have (.*)\?"}
"""What of reasoning-gym's question the prompt keeps: the sentence around it is the same in every problem."""


def chain(
    mistakes: Mistakes,
    rng: random.Random,
    *,
    terms: int = 5,
    digits: int = 1,
    any_order: bool = False,
    farthest: int = 2,
) -> Iterator[Item]:
    """chain_sum: ``8 - 3 + 9``, from left to right.

    any_order: merge any two of the terms, each with its sign, in each step: ``-3 + 9 = 6``. farthest: how far off a
    wrong result is at most."""
    errors = [error for error in range(-farthest, farthest + 1) if error]

    def stated_sum(first: int, second: int) -> int:
        right = first + second
        return mistakes.stated(unordered(first, second), right, [right + error for error in errors], rng)

    settings = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
    for item in _items("chain_sum", settings, rng):
        first, *rest = re.findall(r"[-+]? ?\d+", item["metadata"]["expression"])
        if any_order:
            numbers = tuple(int(term.replace(" ", "")) for term in (first, *rest))
            *lines, last = derive(numbers, stated_sum, rng).split("\n")
            yield _worked("chain", item, lines, int(last.removeprefix("#### ")), key=tuple(sorted(numbers)))
            continue
        total, lines = int(first), []
        for term in rest:
            sign, number = term[0], int(term[1:])
            right = total + number if sign == "+" else total - number
            stated = mistakes.stated(f"{total} {sign} {number}", right, [right + error for error in errors], rng)
            lines.append(f"{total} {sign} {number} = {stated}")
            total = stated
        yield _worked("chain", item, lines, total, key=item["metadata"]["expression"])


def gcd(mistakes: Mistakes, rng: random.Random, *, largest: int = 99) -> Iterator[Item]:
    """gcd of two numbers from 2 on, by Euclid's algorithm. A wrong remainder is another number below the divisor."""
    settings = {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": largest}
    for item in _items("gcd", settings, rng):
        numbers = item["metadata"]["numbers"]
        larger, smaller, lines = max(numbers), min(numbers), []
        while smaller:
            right = larger % smaller
            wrong = [right + error for error in ERRORS if 0 <= right + error < smaller]
            fact = f"{larger} {smaller}"
            stated = mistakes.stated(fact, right, wrong, rng) if wrong else right
            lines.append(f"{larger} % {smaller} = {stated}")
            larger, smaller = smaller, stated
        yield _worked("gcd", item, lines, larger, key=tuple(sorted(numbers)))


def lcm(
    mistakes: Mistakes, rng: random.Random, *, numbers: int = 4, smallest: int = 2, largest: int = 12
) -> Iterator[Item]:
    """lcm of a few numbers, merging any two in each step: ``4 & 6 = 12``. A wrong step gives another number that
    divides the lcm of all."""
    whole = math.lcm(*range(smallest, largest + 1))
    results = [number for number in range(smallest, whole + 1) if whole % number == 0]

    def stated_lcm(first: int, second: int) -> int:
        right = math.lcm(first, second)
        wrong = [other for other in results if other != right]
        return mistakes.stated(unordered(first, second), right, wrong, rng)

    settings = {"min_numbers": numbers, "max_numbers": numbers, "min_value": smallest, "max_value": largest}
    for item in _items("lcm", settings, rng):
        operands = tuple(item["metadata"]["numbers"])
        *lines, last = derive(operands, stated_lcm, rng, "&").split("\n")
        yield _worked("lcm", item, lines, int(last.removeprefix("#### ")), key=tuple(sorted(operands)))


def legs(
    mistakes: Mistakes, rng: random.Random, *, animals: int = 3, most_of_each: int = 9, farthest_sum: int = 0
) -> Iterator[Item]:
    """leg_counting, in any order of the animals: the legs of each kind, then their sum. The weak facts are kinds.

    With ``farthest_sum``, by how many pairs of legs a wrong sum is off at most, all legs come first, in the question's
    order, and are merged then in any order; the weak facts are sums."""
    errors = [2 * error for error in range(-farthest_sum, farthest_sum + 1) if error]

    def stated_sum(first: int, second: int) -> int:
        right = first + second
        wrong = [right + error for error in errors if right + error >= 0]
        return mistakes.stated(unordered(first, second), right, wrong, rng)

    settings = {"min_animals": animals, "max_animals": animals, "min_instances": 1, "max_instances": most_of_each}
    for item in _items("leg_counting", settings, rng):
        from reasoning_gym.arithmetic.leg_counting import ANIMALS  # _items says where it is missing

        kinds = list(item["metadata"]["animals"].items())
        if errors:
            counts = [number * ANIMALS[kind] for kind, number in kinds]
            lines = [f"{number} {kind} = {count}" for (kind, number), count in zip(kinds, counts, strict=True)]
            *sums, last = derive(tuple(counts), stated_sum, rng).split("\n")
            yield _worked("legs", item, [*lines, *sums], int(last.removeprefix("#### ")), key=tuple(sorted(kinds)))
            continue
        rng.shuffle(kinds)
        total, lines = 0, []
        for kind, number in kinds:
            wrong = [other for other in range(0, 16, 2) if other != ANIMALS[kind]]
            found = number * mistakes.stated(kind, ANIMALS[kind], wrong, rng)
            lines += [f"{number} {kind} * {found // number} = {found}", f"{total} + {found} = {total + found}"]
            total += found
        yield _worked("legs", item, lines, total, key=tuple(sorted(kinds)))


def _worked(name: str, item: dict[str, Any], lines: list[str], result: int, key: Any) -> Item:
    match = re.search(_QUESTION[name], item["question"])
    if match is None:
        raise UserError(f"reasoning-gym asks {item['question']!r}, which has no {_QUESTION[name]!r}; install 0.1.25")
    return Item(match[1], item["answer"], "\n".join([*lines, f"#### {result}"]), key)


def _items(name: str, settings: dict[str, Any], rng: random.Random) -> Iterator[dict[str, Any]]:
    """The items of one data set after another. Raises UserError where reasoning-gym is missing or refuses settings."""
    from nemo_edo.data.reasoning_gym import new_dataset

    first = rng.randrange(10**6) * 10**6
    for chunk in count():
        dataset = new_dataset(name, {**settings, "seed": first + chunk * CHUNK, "size": CHUNK})
        yield from (dataset[index] for index in range(CHUNK))
