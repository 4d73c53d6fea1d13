"""Change: pay an amount exactly with given coins. Many payments are right.

    question  31 by 4, 5, 9
    solution  31 - 9 = 22
              22 - 9 = 13
              13 - 4 = 9
              9 - 9 = 0
              #### 0

Each coin may be used any number of times. Every response ends in 0, so that the payment is verified (``score``). Votes
compare the coins that are paid, in any order: payments by other coins are other answers, be they right or wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from examples.study_tasks.family import Item
from nemo_edo.builtin_task.arithmetic import Mistakes

AMOUNTS = range(15, 61)
COINS = (3, 4, 5, 6, 7, 8, 9, 11, 12, 13)
GIVEN = 3
"""Of these coins, in each problem."""
NEEDED = range(3, 7)
"""Coins that a problem needs at least."""
ERRORS = (-2, -1, 1, 2)
"""How far off a wrong result is."""
_STEP = re.compile(r"([0-9]{1,3}) - ([0-9]{1,3}) = ([0-9]{1,3})")


def change(mistakes: Mistakes, rng: random.Random) -> Iterator[Item]:
    """The warm-up pays with as few coins as possible, in any order; after a wrong step it continues from that,
    while that can be paid. The weak facts are differences."""
    while True:
        amount, coins = rng.choice(AMOUNTS), sorted(rng.sample(COINS, GIVEN))
        if fewest_coins(amount, coins) not in NEEDED:
            continue
        yield Item(
            question=f"{amount} by {', '.join(map(str, coins))}",
            answer="0",
            warmup=_with_mistakes(amount, coins, mistakes, rng),
            key=(amount, *coins),
            metadata={"amount": amount, "coins": coins},
        )


def score(responses: Sequence[str], metadata: Sequence[dict], finished: Sequence[bool]) -> list[dict]:
    """1 for each response that pays the amount, and the coins that it pays with."""
    return [
        {"score": float(done and is_payment(text, one["amount"], one["coins"])), "vote": coins_paid(text)}
        for text, one, done in zip(responses, metadata, finished, strict=True)
    ]


def coins_paid(text: str) -> str | None:
    """``4 9 9 9``, without regard to the results of the lines; None where a line but the last pays no coin."""
    *lines, last = text.strip().split("\n")
    steps = [_STEP.fullmatch(line) for line in lines]
    if not steps or None in steps or not last.startswith("####"):
        return None
    return " ".join(map(str, sorted(int(step[2]) for step in steps)))


def is_payment(text: str, amount: int, coins: Sequence[int]) -> bool:
    """Whether each line takes one of the coins from what is left, with the right result, and nothing is left at the
    last line, which says so."""
    *lines, last = text.strip().split("\n")
    left = amount
    for line in lines:
        match = _STEP.fullmatch(line)
        if match is None or int(match[1]) != left or int(match[2]) not in coins:
            return False
        left -= int(match[2])
        if int(match[3]) != left:
            return False
    return left == 0 and last == "#### 0"


def fewest_coins(amount: int, coins: Sequence[int]) -> int | None:
    """None where the coins cannot pay the amount."""
    fewest: list[int | None] = [0]
    for _ in range(amount):
        before = [fewest[-coin] for coin in coins if coin <= len(fewest)]
        ways = [number + 1 for number in before if number is not None]
        fewest.append(min(ways) if ways else None)
    return fewest[amount]


def _with_mistakes(amount: int, coins: Sequence[int], mistakes: Mistakes, rng: random.Random) -> str:
    lines, left = [], amount
    while needed := fewest_coins(left, coins):
        fitting = [coin for coin in coins if coin <= left and fewest_coins(left - coin, coins) == needed - 1]
        coin = rng.choice(fitting)
        right = left - coin
        wrong = [right + error for error in ERRORS if right + error >= 0]
        stated = mistakes.stated(f"{left} - {coin}", right, wrong, rng)
        lines.append(f"{left} - {coin} = {stated}")
        left = stated
    return "\n".join([*lines, "#### 0"])
