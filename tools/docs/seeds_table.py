"""Several runs of one config with other seeds as Markdown tables: each seed, and the mean over seeds.

    python tools/docs/seeds_table.py runs/quickstart runs/seed84 runs/seed126

In the first table an interval is a 95 % bootstrap over the test problems of one seed; in the second it is Student's
t over the seeds: wide with three of them, and the only one of the two that covers the luck of training.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_edo.evaluation.comparison import START, largest
from nemo_edo.evaluation.run_record import RunRecord, read_run
from nemo_edo.metrics import Interval, mean_interval

BOOTSTRAP = 2000


def metrics_of(record: RunRecord) -> list[str]:
    names = list(record.evaluations[START].metrics)
    return ["greedy_accuracy", "accuracy", largest(names, "vote@"), largest(names, "pass@"), "distinct_4", "entropy"]


def by_seed(records: list[RunRecord]) -> list[str]:
    metrics = metrics_of(records[0])
    rows = [header(["arm", "seed", *metrics])]
    for arm in records[0].evaluations:
        for record in records:
            seed = record.summary["seed"]
            intervals = [record.evaluations[arm].interval(metric, resamples=BOOTSTRAP, seed=seed) for metric in metrics]
            rows.append(row([label(record, arm), str(seed), *map(cell, intervals)]))
    return rows


def over_seeds(records: list[RunRecord]) -> list[str]:
    metrics = metrics_of(records[0])
    rows = [header(["arm", *metrics, "greedy gain over the start, each seed"])]
    for arm in records[0].evaluations:
        means = [mean_interval([mean(record, arm, metric) for record in records]) for metric in metrics]
        gains = [mean(record, arm, "greedy_accuracy") - mean(record, START, "greedy_accuracy") for record in records]
        shown = "" if arm == START else ", ".join(f"{gain:+.3f}" for gain in gains)
        rows.append(row([label(records[0], arm), *map(cell, means), shown]))
    return rows


def mean(record: RunRecord, arm: str, metric: str) -> float:
    sums, counts = record.evaluations[arm].metrics[metric]
    return float(sums.sum() / counts.sum())


def label(record: RunRecord, arm: str) -> str:
    return "start (before RL)" if arm == START else record.arms[arm].label


def cell(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def header(names: list[str]) -> str:
    return row(names) + "\n" + row(["---"] * len(names))


if __name__ == "__main__":
    runs = [read_run(Path(folder)) for folder in sys.argv[1:]]
    print("\n".join(by_seed(runs)), "\n".join(over_seeds(runs)), sep="\n\n")
