"""What a check is, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Flag, auto
from typing import Any

PASS, FAIL, IMPOSSIBLE = "pass", "fail", "not possible"


class RunsIn(Flag):
    """Who runs a check. The doctor starts no process and takes seconds; the selftest tries things."""

    DOCTOR = auto()
    CONFIG = auto()
    """The doctor, of a config."""
    SELFTEST = auto()
    NODES = auto()
    """A Slurm job, before its training."""


@dataclass(frozen=True)
class Finding:
    status: str
    """"pass", "fail" or "not possible" (here)."""
    detail: str
    """What was measured, what went wrong, or why it is not possible; of several lines."""
    remedy: str = ""
    """What to do about a failure."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name with its unit."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    run: Callable[..., Finding]
    """Takes a ``Machine``; a check of CONFIG takes a ``Case``."""
    runs_in: RunsIn = RunsIn.SELFTEST
    needs: Callable[..., str | None] = lambda machine: None
    """Says why this machine cannot do it; None where it can."""
    every_rank: bool = False
    """Whether each rank runs it; otherwise the first one does."""


def passed(detail: str, **figures: float) -> Finding:
    return Finding(PASS, detail, figures=figures)


def failed(detail: str, remedy: str = "", **figures: float) -> Finding:
    return Finding(FAIL, detail, remedy, figures)


def impossible(why: str) -> Finding:
    return Finding(IMPOSSIBLE, why)


def together(of_ranks: Mapping[int, Finding | None], named: Callable[[int], str]) -> Finding:
    """One finding of all ranks: what those that failed say, otherwise the first rank's. None: no answer came.

    named: a rank in words.
    """
    first = of_ranks[0]
    faults = {
        rank: failed("has stopped answering") if finding is None else finding
        for rank, finding in of_ranks.items()
        if finding is None or finding.status == FAIL
    }
    if not faults:
        assert first is not None
        return first
    remedy = next((fault.remedy for fault in faults.values() if fault.remedy), "")
    said = {fault.detail for fault in faults.values()}
    if len(faults) == len(of_ranks) and len(said) == 1:  # all ranks have compared the same facts
        return Finding(FAIL, said.pop(), remedy, faults[0].figures)
    lines = [f"{named(rank)}: {fault.detail}" if len(of_ranks) > 1 else fault.detail for rank, fault in faults.items()]
    return Finding(FAIL, "\n".join(lines), remedy, next(iter(faults.values())).figures)
