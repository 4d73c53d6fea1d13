"""How many answers a policy gives to one prompt, and how evenly.

Answers are compared by equality, so they come in canonical form; None is an abstention and is no answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable


def distinct_answers(answers: Iterable[Hashable | None]) -> int:
    """The number of different answers among the responses to one prompt, abstentions not counted."""
    return len({answer for answer in answers if answer is not None})


def answer_entropy(answers: Iterable[Hashable | None], *, normalized: bool = False) -> float:
    """Entropy in nats of the answers' observed shares, H = -sum p log p, over the non-abstaining responses to a prompt.

    From 0.0, where all that answer agree or none answers, to log A, where A answers all differ. normalized: divided by
    that log A, from 0 to 1 (0.0 for fewer than two answers).
    This plug-in estimate (Shannon 1948) is too low for few responses: compare it at equal numbers of them.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    total = counts.total()
    if total < 2:
        return 0.0
    highest = math.log(total)
    entropy = min(math.fsum(count / total * math.log(total / count) for count in counts.values()), highest)
    return entropy / highest if normalized else entropy
