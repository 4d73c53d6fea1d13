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
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from nemo_edo.evaluation.results import POOLED, seeds_interval
from nemo_edo.experiments.study_table import Row
from nemo_edo.metrics import Interval, holm, mean_p_value
from nemo_edo.report.comparison import LEVEL
from nemo_edo.report.conclusions import MALFORMED_BELOW

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
    """The differences by seed."""
    interval: Interval
    """The mean over seeds with its 95 % interval; the ends are NaN with one seed."""
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
        said = []
        for test in self.tests:
            low, high = test.interval.low, test.interval.high
            ends = f" [{low:+.3f}, {high:+.3f}], p {test.p:.3f}" if len(test.values) > 1 else ""
            said.append(f"{test.dose or 'per dose'}: {test.interval.mean:+.3f}{ends}")
        return "; ".join([*said, *(f"{dose}: left out" for dose in self.left_out)])


def findings(
    rows: Iterable[Row], families: Sequence[Family] = FAMILIES, *, temperature: str = "1", diversity: str = POOLED
) -> list[Finding]:
    """Every claim for every task and family that has rows of both arms; the last evaluation of each cell counts.

    temperature: of the responses, as the rows have it. diversity: the column of Distinct-4, ``distinct_4_pooled`` (the
    paper's) or ``distinct_4``. A claim without a paired seed has no data, and with one seed it is not shown.
    """
    metrics = {**METRIC, "diversity": diversity}
    cells = [row for row in rows if row["temperature"] == temperature and not row["note"]]
    table = pd.DataFrame(cells, columns=list(cells[0]) if cells else ["task"])
    for column in ("seed", "iteration", "well_formed", *metrics.values()) if cells else ():
        table[column] = pd.to_numeric(table[column].replace("", None))
    found = [
        finding
        for task, of_task in table.groupby("task", sort=False)
        for family in families
        for finding in _of_family(of_task, str(task), family, metrics)
    ]
    adjusted = iter(holm([test.p for one in found for test in one.tests if len(test.values) > 1]).tolist())
    return [_judged(one, adjusted) for one in found]


def markdown(found: Sequence[Finding]) -> str:
    """The table: a line for each task, method and claim."""
    heads = ["task", "method", "claim", "verdict", "seeds", "differences from the baseline [95 %]"]
    lines = [
        [one.task, one.method, CLAIMS[one.claim], one.verdict,
         str(max((len(test.values) for test in one.tests), default=0)), one.numbers or "no paired seed"]
        for one in found
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def _of_family(table: pd.DataFrame, task: str, family: Family, metrics: Mapping[str, str]) -> list[Finding]:
    last = table.sort_values("iteration", kind="stable").drop_duplicates(["arm", "dose", "seed"], keep="last")
    baseline = last[last["arm"] == family.baseline].drop_duplicates("seed", keep="last").set_index("seed").sort_index()
    of_arm = last[(last["arm"] == family.arm) & (last["dose"] != "")]
    doses = sorted(of_arm["dose"].unique(), key=float)
    if baseline.empty or not doses:
        return []
    by_dose = {dose: of_arm[of_arm["dose"] == dose].set_index("seed").sort_index() for dose in doses}
    whole = {dose: found for dose, found in by_dose.items() if not found["well_formed"].mean() < MALFORMED_BELOW}
    values = {
        claim: pd.DataFrame({"": baseline[metric], **{dose: found[metric] for dose, found in whole.items()}})
        for claim, metric in metrics.items()
    }
    apart = {claim: found.drop(columns="").sub(found[""], axis=0) for claim, found in values.items()}
    ranks = np.arange(len(whole) + 1) - len(whole) / 2  # of the doses, from the baseline's none, around 0
    tests = {
        "entropy": apart["entropy"],
        # The mean rise from one dose to the next, by least squares, over the seeds that have every dose.
        "diversity": pd.DataFrame({"": values["diversity"] @ ranks / (ranks @ ranks)} if whole else {}),
        "votes": apart["votes"][[dose for dose in whole if dose != doses[-1] or len(doses) == 1]],
    }
    broken = tuple(dose for dose in doses if dose not in whole)
    return [
        Finding(task, family.method, claim, NOT_SHOWN, tuple(_tests(metrics[claim], found)), broken)
        for claim, found in tests.items()
    ]


def _tests(metric: str, by_dose: pd.DataFrame) -> Iterable[Test]:
    """One for each dose (column) over the seeds that have a value."""
    for dose, column in by_dose.items():
        values = column.dropna().tolist()
        if values:
            interval = seeds_interval(metric, values, differences=True)
            yield Test(str(dose), tuple(values), interval, mean_p_value(values))


def _judged(finding: Finding, adjusted: Iterable[float]) -> Finding:
    """The finding with the next adjusted p-values, and the verdict that follows from them."""
    numbers = iter(adjusted)
    tests = tuple(replace(test, p=next(numbers)) if len(test.values) > 1 else test for test in finding.tests)
    signs = {np.sign(test.interval.mean) for test in tests if test.p < LEVEL}
    verdict = SHOWN if 1 in signs else REFUTED if -1 in signs else NOT_SHOWN if tests else NO_DATA
    return replace(finding, verdict=verdict, tests=tests)
