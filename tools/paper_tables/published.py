"""The paper's tables, as the CSV files of this folder have them.

``published.csv`` has the numbers, and for the figure of accuracy over iterations its points without them.
``columns.csv`` has the quantities: the metrics of an evaluation, of which the first that was measured is taken, or the
iteration after which the run logged it. ``experiments.csv`` has the configs of ``conf/experiment/`` and the methods
that their arms are: START's arm is an experiment's policy before training, and evaluated_on is ``Overall`` where the
policy is evaluated on the benchmarks that Overall is the mean of.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd

TABLES = {
    "main": "Main results, in distribution",
    "ood": "Out-of-distribution results",
    "seeds": "Robustness to the seed",
    "alpha": "Sensitivity to alpha",
    "test_time": "Test-time scaling strategies",
    "iterations": "Accuracy over iterations",
}
ROW = ["backbone", "trained_on", "evaluated_on", "method"]
"""The columns that name a row of a table."""
OVERALL = "Overall"
OUT_OF_DISTRIBUTION = ("AIME24", "AIME25", "MATH500", "Minerva Math", "OlympiadBench")
"""What ``Overall`` is the plain mean of."""
_BENCHMARKS = {
    **{"gsm8k": "GSM8K", "math": "MATH", "s1k_eval": "s1K_eval"},
    **dict(zip(("aime24", "aime25", "math500", "minerva", "olympiadbench"), OUT_OF_DISTRIBUTION, strict=True)),
}


@functools.cache
def read_texts(name: str) -> pd.DataFrame:
    """A file of this folder, every cell as text."""
    return pd.read_csv(Path(__file__).with_name(name), dtype=str, keep_default_na=False)


@functools.cache
def published(table: str) -> pd.DataFrame:
    """The numbers of a table in the paper's order: ``ROW``, column, value and spread (the standard deviation over
    seeds) in the column's unit, NaN where there is none, and what ``columns.csv`` says of the column."""
    numbers = read_texts("published.csv").query("table == @table").merge(read_texts("columns.csv"), on="column")
    for column in ("value", "spread", "iteration"):
        numbers[column] = pd.to_numeric(numbers[column])
    return numbers


def measured_by(experiment: str | None, arm: str | None = None) -> pd.DataFrame:
    """The rows of ``experiments.csv`` of an experiment, or of one of its arms."""
    rows = read_texts("experiments.csv").query("experiment == @experiment")
    return rows if arm is None else rows.query("arm == @arm")


def evaluated_on(benchmark: str | None, trained_on: str) -> str | None:
    """The paper's name of a benchmark; None where the paper does not use it. For a policy trained on MATH, MATH500 is
    MATH's test set: the paper's accuracies are multiples of 1/500."""
    name = _BENCHMARKS.get(benchmark)
    return "MATH" if (trained_on, name) == ("MATH", "MATH500") else name
