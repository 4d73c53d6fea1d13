"""What a check is, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto

PASS, FAIL, IMPOSSIBLE = "pass", "fail", "not possible"


class RunsIn(Flag):
    """Who runs a check. The doctor takes seconds; the selftest tries things."""

    DOCTOR = auto()
    CONFIG = auto()
    """The doctor, of a config."""
    SELFTEST = auto()
    NODES = auto()
    """A Slurm job, before its training."""


@dataclass(frozen=True)
class Finding:
    status: str
    """"pass", "fail" or "not possible" (on this machine)."""
    detail: str
    """The measurement, the fault, or why the check is not possible; may have several lines."""
    remedy: str = ""
    """The remedy for a failure."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measurements by name, with the unit in the name."""


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
    remedy: str = ""
    """The remedy for a failure whose finding names none."""


def passed(detail: str, **figures: float) -> Finding:
    return Finding(PASS, detail, figures=figures)


def failed(detail: str, remedy: str = "", **figures: float) -> Finding:
    return Finding(FAIL, detail, remedy, figures)


def impossible(why: str) -> Finding:
    return Finding(IMPOSSIBLE, why)


def together(of_ranks: Mapping[int, Finding | None], named: Callable[[int], str]) -> Finding:
    """One finding for all ranks: what failed ranks say, otherwise the first rank's. None: the rank did not answer.

    named: gives a rank's name.
    """
    answers = {rank: finding or failed("has stopped answering") for rank, finding in of_ranks.items()}
    faults = {rank: finding for rank, finding in answers.items() if finding.status == FAIL}
    if not faults:
        return answers[0]
    remedy = next((fault.remedy for fault in faults.values() if fault.remedy), "")
    first, details = next(iter(faults.values())), {fault.detail for fault in faults.values()}
    if len(faults) == len(of_ranks) and len(details) == 1:  # all ranks have compared the same facts
        return Finding(FAIL, first.detail, remedy, first.figures)
    return Finding(
        FAIL, "\n".join(f"{named(rank)}: {fault.detail}" for rank, fault in faults.items()), remedy, first.figures
    )
