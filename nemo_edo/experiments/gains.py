"""Whether candidates give better votes than every baseline: the claim of a held-out study.

For each task and candidate: vote@N minus the vote of the plain method, and minus that of the baseline that is best on
the task, with every policy at the temperature that was best on training problems. A task is won where both
differences, paired by seed, are at least the margin and stand out after Holm's correction of all tests of the table.
The best baseline is the one with the highest mean on the same responses, which favours the baselines. A training that a
guard stopped has no policy to vote with, and counts 0.

The data are rows as a study's CSV file has them (``experiments.study_table``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from nemo_edo.evaluation.results import AT_BEST, START, seeds_interval
from nemo_edo.experiments.study_table import last_rows
from nemo_edo.metrics import Interval, holm, mean_p_value
from nemo_edo.report.comparison import LEVEL

Row = Mapping[str, str]
MARGIN = 0.03
"""The least gain in votes that counts."""
WINNING_SHARE = 0.75
"""Of the tasks, which a candidate has to win."""
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class Gain:
    """A candidate's votes minus a baseline's."""

    task: str
    """Or ``ALL_TASKS``: each seed's mean over the tasks, minus the plain method's or the mean of the best baselines."""
    candidate: str
    rival: str
    values: tuple[float, ...]
    """By seed."""
    interval: Interval
    """Over seeds, 95 %, by Student's t."""
    p: float
    """Two-sided; adjusted by Holm's method for all tests of the table."""

    @property
    def stands(self) -> bool:
        return self.interval.mean >= MARGIN and self.p < LEVEL


def gains(rows: Iterable[Row], baselines: Sequence[str], *, metric: str = "vote") -> list[Gain]:
    """For every arm of the rows that is no baseline: two gains for each task, and two for all tasks.

    baselines: names of arms; the first is the plain method. The last evaluation of each cell counts, at the best
    temperature. Only complete studies are judged: raises ValueError where an arm lacks a seed on some task, for an arm
    with several doses, and for fewer than two seeds.
    """
    cells = _cells(rows, metric)
    arms = list(dict.fromkeys(arm for _, arm in cells))
    tasks = list(dict.fromkeys(task for task, _ in cells))
    _check_complete(cells, tasks, arms, baselines)
    best = {task: max(baselines, key=lambda arm: fmean(cells[task, arm].values())) for task in tasks}
    found = []
    for candidate in (arm for arm in arms if arm not in baselines):
        over_plain = {task: _apart(cells[task, candidate], cells[task, baselines[0]]) for task in tasks}
        over_best = {task: _apart(cells[task, candidate], cells[task, best[task]]) for task in tasks}
        for task in tasks:
            found.append(_gain(task, candidate, baselines[0], over_plain[task]))
            found.append(_gain(task, candidate, best[task], over_best[task]))
        found.append(_gain(ALL_TASKS, candidate, baselines[0], _over_tasks(over_plain)))
        found.append(_gain(ALL_TASKS, candidate, "best of each task", _over_tasks(over_best)))
    adjusted = holm([one.p for one in found]) if found else []
    return [replace(one, p=float(p)) for one, p in zip(found, adjusted, strict=True)]


def tasks_won(found: Iterable[Gain]) -> dict[str, list[str]]:
    """Each candidate's tasks where it stands above both rivals."""
    by_place: dict[tuple[str, str], list[Gain]] = {}
    for one in found:
        by_place.setdefault((one.candidate, one.task), []).append(one)
    won: dict[str, list[str]] = {}
    for (candidate, task), both in by_place.items():
        of_candidate = won.setdefault(candidate, [])
        if task != ALL_TASKS and all(one.stands for one in both):
            of_candidate.append(task)
    return won


def verdict(found: Sequence[Gain]) -> str:
    """In a sentence; a candidate wins that wins ``WINNING_SHARE`` of the tasks."""
    won = tasks_won(found)
    tasks = len({one.task for one in found} - {ALL_TASKS})
    most = math.ceil(WINNING_SHARE * tasks)
    winners = [candidate for candidate, of_candidate in won.items() if len(of_candidate) >= most]
    each = "; ".join(f"{candidate} wins {len(names)} of {tasks}{_named(names)}" for candidate, names in won.items())
    head = f"The claim is won by {' and '.join(winners)}" if winners else "No candidate wins the claim"
    return f"{head} (at least {most} of {tasks} tasks): {each}."


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def markdown(found: Sequence[Gain]) -> str:
    heads = ["candidate", "task", "minus", "seeds", "difference in votes [95 %]", "p (Holm)", f"at least {MARGIN:g}"]
    lines = [
        [one.candidate, one.task, one.rival, str(len(one.values)),
         f"{one.interval.mean:+.3f} [{one.interval.low:+.3f}, {one.interval.high:+.3f}]", f"{one.p:.3f}",
         "yes" if one.stands else "no"]
        for one in found
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def _cells(rows: Iterable[Row], metric: str) -> dict[tuple[str, str], dict[int, float]]:
    """(task, arm) -> seed -> value, of the trained arms; 0 where a guard stopped the training."""
    doses: dict[str, str] = {}
    cells: dict[tuple[str, str], dict[int, float]] = {}
    last = last_rows(rows, AT_BEST.removeprefix("/"))
    for (task, arm, dose, seed), row in sorted(last.items(), key=lambda item: item[0][3]):
        if arm == START:
            continue
        if doses.setdefault(arm, dose) != dose:
            raise ValueError(f"{arm} has the doses {doses[arm]} and {dose}, expected one")
        cells.setdefault((task, arm), {})[seed] = 0.0 if row["note"] else float(row[metric])
    return cells


def _check_complete(cells: Mapping, tasks: Sequence[str], arms: Sequence[str], baselines: Sequence[str]) -> None:
    for task in tasks:
        expected = set().union(*(cells.get((task, arm), {}) for arm in arms))
        for arm in dict.fromkeys((*baselines, *arms)):
            missing = expected - set(cells.get((task, arm), {}))
            if missing:
                raise ValueError(f"{arm} on {task} lacks the seeds {sorted(missing)}")
        if len(expected) < 2:
            raise ValueError(f"{task} has {len(expected)} seed, expected at least 2")


def _apart(candidate: Mapping[int, float], rival: Mapping[int, float]) -> list[float]:
    return [value - rival[seed] for seed, value in sorted(candidate.items())]


def _over_tasks(apart: Mapping[str, Sequence[float]]) -> list[float]:
    """The tasks' mean for each seed."""
    return [fmean(values) for values in zip(*apart.values(), strict=True)]


def _gain(task: str, candidate: str, rival: str, values: Sequence[float]) -> Gain:
    interval = seeds_interval("vote", values, differences=True)
    return Gain(task, candidate, rival, tuple(values), interval, mean_p_value(values))
