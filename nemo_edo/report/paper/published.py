"""The paper's tables, as the CSV files of this folder have them.

``published.csv`` has the numbers, and for the figure of accuracy over iterations its points without them.
``columns.csv`` has the quantities: the metrics of an evaluation, of which the first that was measured is taken, or the
iteration after which the run logged it. ``experiments.csv`` has the configs of ``conf/experiment/`` and the methods
that their arms are: START's arm is an experiment's policy before training, and evaluated_on is ``Overall`` where the
policy is evaluated on the benchmarks that Overall is the mean of.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLES = {
    "main": "Main results, in distribution",
    "ood": "Out-of-distribution results",
    "seeds": "Robustness to the seed",
    "alpha": "Sensitivity to alpha",
    "test_time": "Test-time scaling strategies",
    "iterations": "Accuracy over iterations",
}
OVERALL = "Overall"
OUT_OF_DISTRIBUTION = ("AIME24", "AIME25", "MATH500", "Minerva Math", "OlympiadBench")
"""What ``Overall`` is the plain mean of."""
_BENCHMARKS = {
    **{"gsm8k": "GSM8K", "math": "MATH", "s1k_eval": "s1K_eval"},
    **dict(zip(("aime24", "aime25", "math500", "minerva", "olympiadbench"), OUT_OF_DISTRIBUTION, strict=True)),
}


class Row(NamedTuple):
    """A row of a table: a method on a backbone, trained and evaluated on these benchmarks."""

    backbone: str
    trained_on: str
    evaluated_on: str
    method: str


class Column(NamedTuple):
    """A quantity with its aggregator over responses."""

    title: str
    metrics: tuple[str, ...]
    percent: bool
    """False for Distinct-4, a share."""
    iteration: int | None
    """The evaluation during training after this iteration; None: the one at the end."""


class Published(NamedTuple):
    """A number of the paper, in its column's unit."""

    row: Row
    column: Column
    value: float | None
    """None in a figure."""
    deviation: float | None
    """Standard deviation over seeds, where the value is their mean."""


class Arm(NamedTuple):
    """The row that an experiment's arm measures, and the tables that it is in."""

    row: Row
    tables: tuple[str, ...]


def read_csv(name: str) -> Iterator[dict[str, str]]:
    """The rows of a file of this folder."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@functools.cache
def published(table: str) -> tuple[Published, ...]:
    """The numbers of a table in the paper's order."""
    columns = {
        line["column"]: Column(
            line["column"], tuple(line["metrics"].split()), bool(line["percent"]), _number(line["iteration"], int)
        )
        for line in read_csv("columns.csv")
    }
    return tuple(
        Published(_row(line), columns[line["column"]], _number(line["value"]), _number(line["spread"]))
        for line in read_csv("published.csv")
        if line["table"] == table
    )


@functools.cache
def experiments() -> dict[str, dict[str, Arm]]:
    """The experiments by their config's name: arm -> what it measures."""
    found: dict[str, dict[str, Arm]] = {}
    for line in read_csv("experiments.csv"):
        found.setdefault(line["experiment"], {})[line["arm"]] = Arm(_row(line), tuple(line["tables"].split()))
    return found


def evaluated_on(benchmark: str | None, trained_on: str) -> str | None:
    """The paper's name of a benchmark; None where the paper does not use it. For a policy trained on MATH, MATH500 is
    MATH's test set: the paper's accuracies are multiples of 1/500."""
    name = _BENCHMARKS.get(benchmark)
    return "MATH" if (trained_on, name) == ("MATH", "MATH500") else name


def _row(line: dict[str, str]) -> Row:
    return Row(*(line[name] for name in Row._fields))


def _number(text: str, kind: type = float):
    return kind(text) if text else None
