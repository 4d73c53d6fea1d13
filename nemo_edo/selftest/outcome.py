"""How a check ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

PASS, FAIL, IMPOSSIBLE = "pass", "fail", "not possible"


@dataclass(frozen=True)
class Outcome:
    """status: "pass", "fail" or "not possible" (here). detail: what was measured, what went wrong, or why it is not
    possible. remedy: what to do about a failure. figures: what was measured, by name with its unit. of_rank: whose
    outcome it is."""

    status: str
    detail: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    of_rank: int = 0

    def record(self) -> dict[str, Any]:
        return asdict(self)


def passed(detail: str, **figures: float) -> Outcome:
    return Outcome(PASS, detail, figures=figures)


def failed(detail: str, remedy: str, **figures: float) -> Outcome:
    return Outcome(FAIL, detail, remedy, figures)


def impossible(why: str) -> Outcome:
    return Outcome(IMPOSSIBLE, why)


def worst(of_ranks: list[Outcome]) -> Outcome:
    """The outcome of a check that every rank took part in: the first failure, else the first rank's."""
    failures = [rank for rank, outcome in enumerate(of_ranks) if outcome.status == FAIL]
    rank = failures[0] if failures else 0
    found = of_ranks[rank]
    return replace(found, of_rank=rank, detail=f"rank {rank}: {found.detail}" if rank else found.detail)
