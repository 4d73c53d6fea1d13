"""More tasks for studies, behind one interface: ``data.source=examples.study_tasks.family:make`` with a task's name.

A task gives one problem after another: a question, a worked solution, the same with mistakes for the warm-up, and an
answer. The model of ``model.architecture`` gets a tokenizer of the words that the problems hold.

    residues   sums modulo 17, merged two at a time in any order; weak facts make greedy answers wrong
    products   products modulo 17 of residues other than 0, in the same way
    change     pay an amount with given coins: many different solutions are right
    chain      reasoning-gym's chain_sum, from left to right
    gcd        reasoning-gym's gcd, by Euclid's algorithm
    lcm        reasoning-gym's lcm, merged two at a time in any order
    legs       reasoning-gym's leg_counting, animal by animal in any order
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from typing import Any

from nemo_edo.builtin_task.arithmetic import Mistakes
from nemo_edo.errors import UserError
from nemo_edo.types import Problem
from nemo_edo.utils.wording import did_you_mean

TASKS = {"residues": "residues", "products": "residues", "change": "change"} | dict.fromkeys(
    ("chain", "gcd", "lcm", "legs"), "worked"
)
"""Where each task is: a function of its name, in a module of this package."""
ATTEMPTS_PER_PROBLEM = 20
"""Items that are looked at for each problem, at most: small tasks repeat themselves."""


@dataclass(frozen=True)
class Item:
    """One problem of a task."""

    question: str
    answer: str
    warmup: str
    """A worked solution with mistakes: what the warm-up learns."""
    key: Hashable
    """Problems that differ in order alone have the same; each occurs once in all splits together."""
    metadata: dict[str, Any] = field(default_factory=dict)


def make(
    name: str,
    warmup_problems: int = 4096,
    train_problems: int = 1280,
    test_problems: int = 512,
    weak_fact_share: float = 0.25,
    weak_fact_accuracy: float = 0.35,
    step_noise: float = 0.1,
    warmup_repeats: bool = False,
    seed: int = 0,
    **settings: Any,
) -> dict[str, list[Problem]]:
    """The splits "warmup", "train" and "test" of the task ``name``, whose own settings are ``settings``.

    No problem is in two splits, or twice in one; with ``warmup_repeats`` the warm-up has problems again and again, in
    other orders and with other solutions, so that it learns facts and not solutions by heart. The seed and the settings
    alone fix all of them. Only the warm-up's solutions have mistakes (``mistakes.Mistakes``); train and test have
    answers and no solution.

    Raises UserError for an unknown task or setting, a share outside [0, 1], and where the task has too few problems.
    """
    sizes = {"test": test_problems, "train": train_problems, "warmup": warmup_problems}
    for key, size in sizes.items():
        if size < 1:
            raise UserError(f"data.source_args.{key}_problems is {size}, expected at least 1")
    shares = {"weak_fact_share": weak_fact_share, "weak_fact_accuracy": weak_fact_accuracy, "step_noise": step_noise}
    for key, share in shares.items():
        if not 0 <= share <= 1:
            raise UserError(f"data.source_args.{key} is {share}, expected a number in [0, 1]")
    items = _different(
        _task(name, settings)(Mistakes(name, seed, **shares), random.Random(f"{name} problems {seed}"), **settings),
        name,
        sizes,
        warmup_repeats,
    )
    return {
        split: [
            Problem(f"{name}-{split}-{index}", item.question, item.warmup if split == "warmup" else "", item.answer,
                    f"{name} {split} {index}", metadata={"task": name, **item.metadata})
            for index, item in enumerate(islice(items, size))
        ]
        for split, size in sizes.items()
    }  # fmt: skip


def _task(name: str, settings: dict[str, Any]) -> Callable[..., Iterator[Item]]:
    if name not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(f"data.source_args.name is {name!r}, expected one of {known}{did_you_mean(name, TASKS)}")
    function = getattr(import_module(f"examples.study_tasks.{TASKS[name]}"), name)
    known = [key for key in inspect.signature(function).parameters if key not in ("mistakes", "rng")]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        has = f"has {', '.join(known)}" if known else "has none"
        raise UserError(f"data.source_args.{unknown[0]}: the task {name} {has}{did_you_mean(unknown[0], known)}")
    return function


def _different(items: Iterator[Item], name: str, sizes: dict[str, int], warmup_repeats: bool) -> Iterator[Item]:
    """The items without repetitions, but for those of the warm-up among themselves with ``warmup_repeats``."""
    seen: set[Hashable] = set()
    wanted = sum(sizes.values())
    unlike = wanted - sizes["warmup"] if warmup_repeats else wanted
    for item in islice(items, ATTEMPTS_PER_PROBLEM * wanted):
        if item.key not in seen:
            if len(seen) < unlike:
                seen.add(item.key)
            yield item
    raise UserError(
        f"data.source_args: {name} gave {len(seen)} different problems, fewer than the {wanted} of warmup_problems + "
        "train_problems + test_problems; ask for fewer, or widen the task's settings"
    )
