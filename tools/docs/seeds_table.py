"""Several runs of one config with different seeds as Markdown tables: each seed, the mean over seeds, and the mean over
seeds of each arm's difference from the baseline of the same seed.

    python tools/docs/seeds_table.py runs/quickstart runs/seed84 runs/seed126

In the first table an interval is over the test problems of one seed (95 %); in the others it is Student's
t over the seeds: wide with three seeds, but it covers training randomness.
"""

from __future__ import annotations

import sys
from pathlib import Path

from report_tables import markdown

from nemo_edo.evaluation.results import START, main_metrics, seeds_interval
from nemo_edo.metrics import Interval
from nemo_edo.report.run_set import RunRecord, read_run

BOOTSTRAP = 2000


def tables(records: list[RunRecord]) -> list[str]:
    first = records[0]
    metrics = main_metrics(list(first.evaluations[START].metrics))
    return [
        markdown(["arm", "seed", *metrics], by_seed(records, metrics)),
        markdown(["arm", *metrics, "greedy gain over the start, each seed"], over_seeds(records, metrics)),
        markdown([f"minus {label(first, first.summary['baseline'])}", *metrics], paired(records, metrics)),
    ]


def by_seed(records: list[RunRecord], metrics: list[str]) -> list[list[str]]:
    rows = []
    for arm in records[0].evaluations:
        for record in records:
            found = record.evaluations[arm].intervals(resamples=BOOTSTRAP, seed=record.seed)
            rows.append([label(record, arm), str(record.seed), *(cell(found[metric]) for metric in metrics)])
    return rows


def over_seeds(records: list[RunRecord], metrics: list[str]) -> list[list[str]]:
    rows = []
    for arm in records[0].evaluations:
        means = [seeds_interval(m, [record.evaluations[arm].mean(m) for record in records]) for m in metrics]
        gains = [] if arm == START else differences(records, arm, START, "greedy_accuracy")
        rows.append([label(records[0], arm), *map(cell, means), ", ".join(f"{gain:+.3f}" for gain in gains)])
    return rows


def apart(records: list[RunRecord], arm: str, baseline: str, metric: str) -> Interval:
    return seeds_interval(metric, differences(records, arm, baseline, metric), differences=True)


def paired(records: list[RunRecord], metrics: list[str]) -> list[list[str]]:
    baseline = records[0].summary["baseline"]
    return [
        [label(records[0], arm), *(cell(apart(records, arm, baseline, metric)) for metric in metrics)]
        for arm in records[0].arms
        if arm != baseline
    ]


def differences(records: list[RunRecord], arm: str, other: str, metric: str) -> list[float]:
    return [record.evaluations[arm].mean(metric) - record.evaluations[other].mean(metric) for record in records]


def label(record: RunRecord, arm: str) -> str:
    return "start (before RL)" if arm == START else record.arms[arm].label


def cell(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


if __name__ == "__main__":
    print("\n\n".join(tables([read_run(Path(folder)) for folder in sys.argv[1:]])) + "\n")
