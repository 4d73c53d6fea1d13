"""The built-in task: sum a few numbers, merging any two of those left in each step.

    question  6 + 1 + 3 + 1
    solution  6 + 3 = 9
              1 + 1 = 2
              9 + 2 = 11
              #### 11

Every order of merging leads to the answer, so that diversity can be counted. The supervised warm-up learns from
solutions with mistakes: some addition facts ("weak" ones) are mostly wrong there, each in its own way, and every
other step now and then.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import comb
from pathlib import Path

from nemo_edo.config import ArithmeticConfig
from nemo_edo.errors import UserError
from nemo_edo.types import Problem

STEP_ERRORS = (-2, -1, 1, 2)  # how far off the result of a wrong step is
_MAX_POOL = 1_000_000  # question strings that are candidates at most: memory and time stay small for large operands
_STEP = re.compile(r"(0|[1-9][0-9]{0,8}) \+ (0|[1-9][0-9]{0,8}) = (0|[1-9][0-9]{0,8})")

Operands = tuple[int, ...]


@dataclass(frozen=True)
class Mistakes:
    """Which steps of the warm-up's solutions are wrong, and how: its policy is wrong in a known way, with room to
    improve. A greedy answer has weak facts wrong, too, and only sampling finds the right result."""

    task: str  # tasks with the same seed have different weak facts
    seed: int
    weak_fact_share: float  # share of the facts that are weak
    weak_fact_accuracy: float  # how often a weak fact is right
    step_noise: float  # share of the other steps that are wrong

    def is_weak(self, fact: str) -> bool:
        return self._rng("fact", fact).random() < self.weak_fact_share

    def stated(self, fact: str, right: int, wrong: Sequence[int], rng: random.Random) -> int:
        """The result of a step that uses the fact: ``right``, or one of ``wrong``, always the same for a weak fact."""
        if self.is_weak(fact):
            return right if rng.random() < self.weak_fact_accuracy else self._rng("misconception", fact).choice(wrong)
        return right if rng.random() < 1 - self.step_noise else rng.choice(wrong)

    def _rng(self, what: str, fact: str) -> random.Random:
        return random.Random(f"{self.task} {what} {self.seed} {fact}")


def make_problems(config: ArithmeticConfig, folder: Path) -> dict[str, list[Problem]]:
    """The problems of warmup, train and test, with solutions; config alone fixes them. folder: where their files are
    or will be, for messages.

    Operands are integers from 0 to ``max_operand``. No question occurs twice, and no test question is a permutation
    of another one or of a train or warm-up question. Answers of train and test are right. In warm-up solutions, a
    step that adds a weak fact is right with probability ``weak_fact_accuracy`` and otherwise gives the fact's fixed
    wrong sum; any other is right with probability 1 - ``step_noise`` and otherwise gives a random wrong one. Later
    steps use the wrong result, and the final answer agrees with the chain.

    Raises UserError (a ValueError) if there are not enough questions for the sizes asked.
    """
    rng = random.Random(f"arithmetic solutions {config.seed}")
    mistakes = Mistakes("arithmetic", config.seed, config.weak_fact_share, config.weak_fact_accuracy, config.step_noise)

    def noisy_sum(first: int, second: int) -> int:
        total = first + second
        wrong = [total + error for error in STEP_ERRORS if total + error >= 0]
        return mistakes.stated(unordered(first, second), total, wrong, rng)

    def problems(split: str, questions: list[Operands], add: Callable[[int, int], int]) -> list[Problem]:
        made = []
        for number, operands in enumerate(questions, start=1):
            solution, source = derive(operands, add, rng), f"{folder / split}.jsonl:{number}"
            answer = solution.rpartition("#### ")[2]
            made.append(Problem(f"{split}-{number}", " + ".join(map(str, operands)), solution, answer, source))
        return made

    # The first distinct multisets of a random order of all questions are the test's, and with them every permutation;
    # train and warm-up divide what is left.
    base = config.max_operand + 1
    total = base**config.num_operands
    codes = random.Random(f"arithmetic questions {config.seed}").sample(range(total), min(total, _MAX_POOL))
    pool = [tuple(code // base**place % base for place in range(config.num_operands)) for code in codes]
    test: dict[Operands, Operands] = {}
    for operands in pool:
        if len(test) == config.test_problems:
            break
        test.setdefault(tuple(sorted(operands)), operands)
    rest = [operands for operands in pool if tuple(sorted(operands)) not in test]
    needed = config.train_problems + config.warmup_problems
    if len(test) < config.test_problems or len(rest) < needed:
        multisets = comb(config.max_operand + config.num_operands, config.num_operands)
        raise UserError(
            f"data.arithmetic asks for {config.test_problems} test problems and {config.train_problems} train + "
            f"{config.warmup_problems} warm-up problems, but {config.num_operands} operands from 0 to "
            f"{config.max_operand} make {multisets} multisets ({total} questions), of which the test leaves "
            f"{len(rest)} questions; raise num_operands or max_operand, or ask for fewer problems"
        )
    made = {"test": problems("test", list(test.values()), int.__add__)}
    made["train"] = problems("train", rest[: config.train_problems], int.__add__)
    made["warmup"] = problems("warmup", rest[config.train_problems : needed], noisy_sum)
    return made


def solution_path(*, question: str, text: str) -> tuple[tuple[int, int], ...] | None:
    """Which numbers were merged: the sorted merges, each the sorted pair of its summands, so that neither the order of
    independent lines nor that of summands makes another path: n distinct operands have at most (2n - 3)!! paths. None
    unless each line merges two numbers that are left and the last result is the answer, right or wrong."""
    *lines, last = text.strip().split("\n")
    merges, end = _merges(question, lines, right=False)
    return tuple(sorted(merges)) if len(merges) == len(lines) and last == end else None


def first_wrong_step(question: str, steps: Sequence[str]) -> int | None:
    """The index of the first step that is wrong; None where all are right, whether or not they lead to the end. A step
    is right if it adds two remaining numbers correctly, or ends with the only remaining number as the answer."""
    merges, end = _merges(question, steps, right=True)
    right = len(merges) + (list(steps[len(merges) :][:1]) == [end])
    return right if right < len(steps) else None


def _merges(question: str, steps: Sequence[str], *, right: bool) -> tuple[list[tuple[int, int]], str | None]:
    """The merges of the first steps that each take two remaining numbers (right: and add them correctly), and the line
    that states the only number after them; None where several are left."""
    left, merges = Counter(int(operand) for operand in question.split(" + ")), []
    for match in takewhile(bool, map(_STEP.fullmatch, steps)):
        first, second, total = (int(number) for number in match.groups())
        left.subtract((first, second))
        if min(left.values()) < 0 or (right and first + second != total):
            break
        left[total] += 1
        merges.append((min(first, second), max(first, second)))
    return merges, f"#### {next(left.elements())}" if left.total() == 1 else None


def unordered(first: int, second: int) -> str:
    """The fact ``first + second``, whatever the order."""
    return f"{min(first, second)} {max(first, second)}"


def derive(operands: Operands, add: Callable[[int, int], int], rng: random.Random, sign: str = "+") -> str:
    """A derivation that merges random pairs, in random order: ``add`` gives the result, which ``sign`` stands for."""
    left = list(operands)
    lines = []
    while len(left) > 1:
        rng.shuffle(left)
        first, second = left.pop(), left.pop()
        left.append(add(first, second))
        lines.append(f"{first} {sign} {second} = {left[-1]}")
    return "\n".join([*lines, f"#### {left[0]}"])
