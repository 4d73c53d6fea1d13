"""The verdict on a held-out study's claim, from the rows of its table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from nemo_edo.evaluation.results import AT_BEST, START, seeds_interval
from nemo_edo.experiments.study_table import Row, cell_of, last_rows
from nemo_edo.metrics import Interval, detectable, holm, mean_p_value
from nemo_edo.report.comparison import LEVEL

MARGIN = 0.03
"""The least gain in votes that counts."""
WINNING_SHARE = 0.75
"""The share of the tasks that a candidate has to win."""
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class Gain:
    """A candidate's votes minus a baseline's."""

    task: str
    """A task, or ``ALL_TASKS``: each seed's mean over tasks, minus the plain method's or that of the best baselines."""
    candidate: str
    rival: str
    values: tuple[float, ...]
    """The differences by seed."""
    interval: Interval
    """The mean over seeds with Student's t interval (95 %)."""
    p: float
    """Two-sided; adjusted by Holm's method for all tests of the table."""
    detectable: float
    """The least true difference that these seeds show with probability 0.8, before any correction."""

    @property
    def stands(self) -> bool:
        return self.interval.mean >= MARGIN and self.p < LEVEL


def gains(rows: Iterable[Row], baselines: Sequence[str], *, metric: str = "vote") -> list[Gain]:
    """Whether candidates give better votes than every baseline, the claim of a held-out study: two gains for each task,
    and two for all tasks, of every arm that is not a baseline.

    A gain is vote@N minus that of the plain method, or of the baseline that is best on the task: with the highest mean
    on the same responses, which favours the baselines. Every policy is at the temperature that was best on training
    problems. A training that a guard stopped has no policy to vote with, and counts 0, as one that states no answer.

    baselines: names of arms; the first is the plain method. The last evaluation of each cell counts. Only complete
    studies are judged: raises ValueError where an arm lacks a seed on some task, for an arm with several doses, and for
    fewer than two seeds.
    """
    rows = [*rows]
    votes = _votes(rows, baselines, metric)
    # Votes over n problems go by 1 / n: seeds that differ can tie (``mean_interval``).
    problems = {row["task"]: int(row["problems"]) for row in rows if row["problems"]}
    roundings = {task: 1 / problems.get(task, 1) ** 2 / 6 for task in votes.index.unique("task")}
    best = votes[[*baselines]].groupby("task", sort=False).mean().idxmax(axis=1)
    rival = pd.Series([votes.at[(task, seed), best[task]] for task, seed in votes.index], votes.index)
    apart: list[tuple[str, str, str, list[float], float]] = []
    for candidate in votes.columns.drop([*baselines]):
        over_plain, over_best = votes[candidate] - votes[baselines[0]], votes[candidate] - rival
        for task in best.index:
            apart.append((task, candidate, baselines[0], over_plain[task].tolist(), roundings[task]))
            apart.append((task, candidate, best[task], over_best[task].tolist(), roundings[task]))
        of_mean = sum(roundings.values()) / len(roundings) ** 2
        apart.append((ALL_TASKS, candidate, baselines[0], over_plain.groupby("seed").mean().tolist(), of_mean))
        apart.append((ALL_TASKS, candidate, "best of each task", over_best.groupby("seed").mean().tolist(), of_mean))
    adjusted = holm([mean_p_value(values, rounding=rounding) for *_, values, rounding in apart]) if apart else []
    return [
        Gain(
            *(task, candidate, other, tuple(values)),
            interval=seeds_interval("vote", values, differences=True, rounding=rounding),
            p=float(p),
            detectable=detectable(values, rounding=rounding),
        )
        for (task, candidate, other, values, rounding), p in zip(apart, adjusted, strict=True)
    ]


def tasks_won(found: Iterable[Gain]) -> dict[str, list[str]]:
    """The tasks on which each candidate is above both baselines: the differences, paired by seed, are at least
    ``MARGIN`` and stand out after Holm's correction of all tests."""
    table = pd.DataFrame([(one.candidate, one.task, one.stands) for one in found], columns=["candidate", "task", "won"])
    both = table[table["task"] != ALL_TASKS].groupby(["candidate", "task"], sort=False)["won"].all()
    return {candidate: list(both[candidate].index[both[candidate]]) for candidate in table["candidate"].unique()}


def verdict(found: Sequence[Gain]) -> str:
    """The verdict in a sentence; a candidate wins that wins ``WINNING_SHARE`` of the tasks."""
    won = tasks_won(found)
    tasks = len({one.task for one in found} - {ALL_TASKS})
    most = math.ceil(WINNING_SHARE * tasks)
    winners = [candidate for candidate, of_candidate in won.items() if len(of_candidate) >= most]
    each = "; ".join(
        f"{candidate} wins {len(names)} of {tasks}" + (f" ({', '.join(names)})" if names else "")
        for candidate, names in won.items()
    )
    head = f"The claim is won by {' and '.join(winners)}" if winners else "No candidate wins the claim"
    return f"{head} (at least {most} of {tasks} tasks): {each}."


def markdown(found: Sequence[Gain]) -> str:
    heads = ["candidate", "task", "minus", "seeds", "difference in votes [95 %]", "detectable", "p (Holm)",
             f"at least {MARGIN:g}"]  # fmt: skip
    lines = [
        [one.candidate, one.task, one.rival, str(len(one.values)),
         f"{one.interval.mean:+.3f} [{one.interval.low:+.3f}, {one.interval.high:+.3f}]", f"{one.detectable:.3f}",
         f"{one.p:.3f}", "yes" if one.stands else "no"]
        for one in found
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def _votes(rows: Sequence[Row], baselines: Sequence[str], metric: str) -> pd.DataFrame:
    """A column for each trained arm, a row for each task and seed; 0 where a guard stopped the training, or the policy
    states no answer."""
    last = last_rows(rows, AT_BEST.removeprefix("/"))
    voted = {cell: float(row[metric]) for cell, row in last.items() if row[metric]}
    tasks = {task for task, *_ in voted}  # a task without answers has no votes
    trained = dict.fromkeys(cell for cell in map(cell_of, rows) if cell[1] != START and cell[0] in tasks)
    if not trained:
        raise ValueError("no policy has votes at its best temperature: nothing can be judged")
    cells = pd.DataFrame(
        [(*cell, voted.get(cell, 0.0)) for cell in trained], columns=["task", "arm", "dose", "seed", "vote"]
    )
    for arm, doses in cells.groupby("arm")["dose"].unique().items():
        if len(doses) > 1:
            raise ValueError(f"{arm} has the doses {' and '.join(doses)}, expected one")
    votes = cells.pivot(index=["task", "seed"], columns="arm", values="vote")
    votes = votes.reindex(cells["task"].unique(), level="task")
    votes = votes.reindex(columns=list(dict.fromkeys([*cells["arm"], *baselines])))
    for task, of_task in votes.groupby("task", sort=False):
        for arm, missing in of_task.isna().items():
            if missing.any():
                raise ValueError(f"{arm} on {task} lacks the seeds {[seed for _, seed in of_task.index[missing]]}")
        if len(of_task) < 2:
            raise ValueError(f"{task} has {len(of_task)} seed, expected at least 2")
    return votes
