"""Several runs of one config with other seeds as Markdown tables: each seed, the mean over seeds, and the mean over
seeds of each arm's difference from the baseline of the same seed.

    python tools/docs/seeds_table.py runs/quickstart runs/seed84 runs/seed126

In the first table an interval is a 95 % bootstrap over the test problems of one seed; in the others it is Student's
t over the seeds: wide with three of them, but it covers the luck of training.
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


def paired(records: list[RunRecord]) -> list[str]:
    metrics = metrics_of(records[0])
    baseline = records[0].summary["baseline"]
    rows = [header([f"minus {label(records[0], baseline)}", *metrics])]
    for arm in records[0].arms:
        if arm != baseline:
            gaps = [[mean(r, arm, metric) - mean(r, baseline, metric) for r in records] for metric in metrics]
            rows.append(row([label(records[0], arm), *(cell(mean_interval(gap)) for gap in gaps)]))
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
    for table in (by_seed(runs), over_seeds(runs), paired(runs)):
        print("\n".join(table), end="\n\n")
