"""The paper's three claims about exploration, each tested on each task: shown, not shown or refuted, with numbers.

    entropy    entropy is kept: the exploring arm ends with more than the baseline of the same seed
    diversity  Distinct-4 rises with alpha: with each dose, from the baseline's none to the largest
    votes      votes gain at moderate alpha: at a dose below the largest

The data are rows as a study's CSV file has them: task, arm, dose, seed, iteration, temperature, note, and a column for
each metric. Differences are paired by seed and tested by Student's t; Holm's correction covers every test of the table.
A claim is shown where a test finds it, refuted where a test finds the opposite and none finds it, and not shown
otherwise. Doses whose answers lost their form are left out: their entropy and diversity are not a merit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from nemo_edo.evaluation.results import POOLED, seeds_interval
from nemo_edo.metrics import Interval, holm, mean_p_value
from nemo_edo.report.comparison import LEVEL
from nemo_edo.report.conclusions import MALFORMED_BELOW

Row = Mapping[str, str]
SHOWN, NOT_SHOWN, REFUTED, NO_DATA = "shown", "not shown", "refuted", "no data"
CLAIMS = {
    "entropy": "entropy kept",
    "diversity": "Distinct-4 rises with alpha",
    "votes": "votes gain at moderate alpha",
}
METRIC = {"entropy": "entropy", "diversity": POOLED, "votes": "vote"}
"""The column that each claim is about."""


@dataclass(frozen=True)
class Family:
    """A method at several doses, with the baseline that is its dose 0."""

    method: str
    arm: str
    baseline: str


FAMILIES = (
    Family("ED-GRPO", "ed_grpo", "grpo"),
    Family("ED-GRPO with a floor", "ed_grpo_floor", "grpo"),
    Family("ED-iDPO", "ed_idpo", "eto"),
)
"""The methods by their arms' names in ``conf/arm/``."""


@dataclass(frozen=True)
class Test:
    """One difference from the baseline, or the slope over doses."""

    __test__ = False  # no class of tests
    dose: str
    """Empty for a slope."""
    values: tuple[float, ...]
    """By seed."""
    interval: Interval
    """Over seeds, 95 %; its ends are NaN with one."""
    p: float
    """Two-sided, adjusted by Holm's method for all tests of the table; NaN with one seed."""


@dataclass(frozen=True)
class Finding:
    """What became of a claim on a task."""

    task: str
    method: str
    claim: str
    verdict: str
    tests: tuple[Test, ...]
    left_out: tuple[str, ...]
    """Doses that broke down, or that no seed finished."""

    @property
    def numbers(self) -> str:
        """Each test as "0.1: +0.031 [+0.004, +0.058], p 0.020"."""
        return "; ".join([*map(_in_words, self.tests), *(f"{dose}: left out" for dose in self.left_out)])


def findings(
    rows: Iterable[Row], families: Sequence[Family] = FAMILIES, *, temperature: str = "1", diversity: str = POOLED
) -> list[Finding]:
    """Every claim for every task and family that has rows of both arms; the last evaluation of each cell counts.

    temperature: of the responses, as the rows have it. diversity: the column of Distinct-4, ``distinct_4_pooled`` (the
    paper's) or ``distinct_4``. A claim without a paired seed has no data, and with one seed it is not shown.
    """
    cells = _last(row for row in rows if row["temperature"] == temperature and not row["note"])
    metrics = {**METRIC, "diversity": diversity}
    found = [
        finding
        for task in dict.fromkeys(task for task, *_ in cells)
        for family in families
        for finding in _of_family(cells, task, family, metrics)
    ]
    p_values = [test.p for one in found for test in one.tests if len(test.values) > 1]
    adjusted = iter(holm(p_values).tolist() if p_values else [])
    return [_judged(one, adjusted) for one in found]


def markdown(found: Sequence[Finding]) -> str:
    """The table: a line for each task, method and claim."""
    heads = ["task", "method", "claim", "verdict", "seeds", "differences from the baseline [95 %]"]
    lines = [
        [one.task, one.method, CLAIMS[one.claim], one.verdict, _seeds(one), one.numbers or "no paired seed"]
        for one in found
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


Cells = dict[tuple[str, str, str, int], Row]
"""(task, arm, dose, seed) -> row."""


def _last(rows: Iterable[Row]) -> Cells:
    cells: Cells = {}
    for row in rows:
        key = (row["task"], row["arm"], row["dose"], int(row["seed"]))
        if key not in cells or int(cells[key]["iteration"]) <= int(row["iteration"]):
            cells[key] = row
    return cells


def _of_family(cells: Cells, task: str, family: Family, metrics: Mapping[str, str]) -> list[Finding]:
    of_task = {key: row for key, row in cells.items() if key[0] == task}
    baseline = {seed: row for (_, arm, _, seed), row in of_task.items() if arm == family.baseline}
    doses = sorted({dose for _, arm, dose, _ in of_task if arm == family.arm and dose}, key=float)
    if not baseline or not doses:
        return []
    by_dose: dict[str, dict[int, Row]] = {dose: {} for dose in doses}
    for (_, arm, dose, seed), row in of_task.items():
        if arm == family.arm and dose:
            by_dose[dose][seed] = row
    broken = tuple(dose for dose, found in by_dose.items() if _broke_down(found))
    whole = {dose: found for dose, found in by_dose.items() if dose not in broken}
    moderate = {dose: found for dose, found in whole.items() if dose != doses[-1] or len(doses) == 1}
    tests = {
        "entropy": [_difference(metrics["entropy"], dose, rows, baseline) for dose, rows in whole.items()],
        "diversity": [_slope(metrics["diversity"], whole, baseline)],
        "votes": [_difference(metrics["votes"], dose, rows, baseline) for dose, rows in moderate.items()],
    }
    return [
        Finding(task, family.method, claim, NOT_SHOWN, tuple(test for test in of_claim if test), broken)
        for claim, of_claim in tests.items()
    ]


def _broke_down(rows: Mapping[int, Row]) -> bool:
    shares = [float(row["well_formed"]) for row in rows.values() if row["well_formed"]]
    return bool(shares) and fmean(shares) < MALFORMED_BELOW


def _difference(metric: str, dose: str, rows: Mapping[int, Row], baseline: Mapping[int, Row]) -> Test | None:
    """Of a dose from the baseline, over the seeds that both have; None without one."""
    values = [
        float(rows[seed][metric]) - float(baseline[seed][metric])
        for seed in sorted(rows.keys() & baseline.keys())
        if rows[seed][metric] and baseline[seed][metric]
    ]
    return _test(metric, dose, values)


def _slope(metric: str, by_dose: Mapping[str, Mapping[int, Row]], baseline: Mapping[int, Row]) -> Test | None:
    """Of the metric over the doses' ranks, from 0 for the baseline: the mean rise from one dose to the next, by least
    squares. Over the seeds that have every dose; None without one."""
    arms = [baseline, *by_dose.values()]
    seeds = sorted(set.intersection(*(set(arm) for arm in arms)))
    lines = [[arm[seed][metric] for arm in arms] for seed in seeds]
    ranks = np.arange(len(arms)) - (len(arms) - 1) / 2
    values = [float(ranks @ np.array(line, dtype=float) / (ranks @ ranks)) for line in lines if all(line)]
    return _test(metric, "", values) if by_dose else None


def _test(metric: str, dose: str, values: Sequence[float]) -> Test | None:
    if not values:
        return None
    return Test(dose, tuple(values), seeds_interval(metric, values, differences=True), mean_p_value(values))


def _judged(finding: Finding, adjusted: Iterable[float]) -> Finding:
    """With the next adjusted p-values, and the verdict that follows from them."""
    numbers = iter(adjusted)
    tests = tuple(
        Test(test.dose, test.values, test.interval, next(numbers)) if len(test.values) > 1 else test
        for test in finding.tests
    )
    signs = {np.sign(test.interval.mean) for test in tests if test.p < LEVEL}
    verdict = SHOWN if 1 in signs else REFUTED if -1 in signs else NOT_SHOWN if tests else NO_DATA
    return Finding(finding.task, finding.method, finding.claim, verdict, tests, finding.left_out)


def _in_words(test: Test) -> str:
    mean = f"{test.dose or 'per dose'}: {test.interval.mean:+.3f}"
    ends = f" [{test.interval.low:+.3f}, {test.interval.high:+.3f}], p {test.p:.3f}"
    return mean + ends if len(test.values) > 1 else mean


def _seeds(finding: Finding) -> str:
    return str(max((len(test.values) for test in finding.tests), default=0))
