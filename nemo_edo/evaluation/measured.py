"""What runs measured: an evaluated policy's numbers, with intervals over problems or over seeds.

Dimensions: P problems, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import ALONE_LABEL, START, START_LABEL, UNTRAINED_LABEL
from nemo_edo.evaluation.paper_tables import EXPERIMENTS, Column, Row, evaluated_on
from nemo_edo.evaluation.run_record import RunRecord, number, setting
from nemo_edo.metrics import Interval, bootstrap_ratio, mean_interval

Ratio = tuple[np.ndarray, np.ndarray]
"""(sums [P], counts [P]) over problems."""


@dataclass(frozen=True)
class Measured:
    """A measured number, in the column's unit."""

    mean: float
    low: float
    """95 %: over problems (bootstrap) with one seed, over seeds (Student's t) with several."""
    high: float
    deviation: float | None
    """Standard deviation over seeds (n - 1); None with one seed."""
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """An evaluated policy of a run."""

    record: RunRecord
    arm: str
    ratios: Mapping[str, Ratio]
    reasons: tuple[str, ...]

    @property
    def seed(self) -> int:
        return self.record.summary["seed"]

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl on its evaluations during and after training."""
        return self.record.of("evaluation", self.arm)

    @property
    def row(self) -> Row:
        """Of the paper's table. Only for an entry without ``reasons``."""
        experiment = EXPERIMENTS[self.record.config["experiment"]]
        tested = evaluated_on(tested_on(self.record), experiment.trained_on)
        return Row(experiment.backbone, experiment.trained_on, tested, experiment.methods[self.arm])

    @property
    def label(self) -> str:
        if self.arm == START:
            alone = UNTRAINED_LABEL if self.record.config.get("algorithm") == "none" else ALONE_LABEL
            return START_LABEL if self.record.arms else alone
        return self.record.arms[self.arm].label


def measured(column: Column, entries: Sequence[Entry]) -> Measured | None:
    """Of one policy's runs, a seed each; None where none of them measured it."""
    factor = 100.0 if column.percent else 1.0
    if column.iteration is not None:
        found = {entry.seed: interval for entry in entries if (interval := _at_iteration(entry, column))}
    else:
        ratios = {entry.seed: ratio for entry in entries if (ratio := ratio_of(column, entry)) is not None}
        found = {seed: _bootstrap(ratio, entries[0]) for seed, ratio in ratios.items()}
    return over_seeds({seed: scaled(interval, factor) for seed, interval in found.items()})


def _at_iteration(entry: Entry, column: Column) -> Interval | None:
    """As the run logged it."""
    cells = [
        line["metrics"][metric]
        for line in entry.evaluated
        for metric in column.metrics
        if line["iteration"] == column.iteration and metric in line["metrics"]
    ]
    if not cells:
        return None
    last = cells[-1]  # an evaluation made anew replaces the one before
    return Interval(*(number(last.get(key)) for key in ("mean", "low", "high")))


def ratio_of(column: Column, entry: Entry) -> Ratio | None:
    return next((entry.ratios[m] for m in column.metrics if m in entry.ratios and entry.ratios[m][1].sum() > 0), None)


def _bootstrap(ratio: Ratio, entry: Entry) -> Interval:
    return bootstrap_ratio(*ratio, resamples=setting(entry.record, "evaluation.bootstrap"), seed=entry.seed)


def scaled(interval: Interval, factor: float) -> Interval:
    return Interval(interval.mean * factor, interval.low * factor, interval.high * factor)


def over_seeds(by_seed: Mapping[int, Interval]) -> Measured | None:
    if not by_seed:
        return None
    seeds = tuple(sorted(by_seed))
    if len(seeds) == 1:
        only = by_seed[seeds[0]]
        return Measured(only.mean, only.low, only.high, None, seeds)
    means = [by_seed[seed].mean for seed in seeds]
    over = mean_interval(means)
    return Measured(over.mean, over.low, over.high, float(np.std(means, ddof=1)), seeds)


def one_a_seed(entries: Iterable[Entry], what: str) -> list[Entry]:
    """Raises UserError where a seed is there twice. Only the start of runs with arms may be: they share it, and the
    first counts."""
    by_seed: dict[int, Entry] = {}
    for entry in entries:
        if entry.seed in by_seed and entry.arm == START and entry.record.arms:
            continue
        if entry.seed in by_seed:
            raise UserError(
                f"{by_seed[entry.seed].record.folder} and {entry.record.folder} both measured {what} with seed "
                f"{entry.seed}: a seed counts once, so name one of them only"
            )
        by_seed[entry.seed] = entry
    return list(by_seed.values())


def mean_of_ratios(ratios: Sequence[Ratio], resamples: int, seed: int) -> Interval:
    """The mean of sum(sums) / sum(counts) over separate sets of problems, with its 95 % percentile bootstrap: problems
    are resampled within each set (a stratified bootstrap; Davison and Hinkley 1997, section 3.2)."""
    rng = np.random.default_rng(seed)
    totals_R = np.zeros(resamples)
    for sums_P, counts_P in ratios:
        size = len(sums_P)
        weights_RP = rng.multinomial(size, np.full(size, 1 / size), size=resamples)
        totals_R += (weights_RP @ sums_P) / (weights_RP @ counts_P)
    means_R = totals_R / len(ratios)
    mean = sum(float(sums_P.sum() / counts_P.sum()) for sums_P, counts_P in ratios) / len(ratios)
    low, high = np.nanquantile(means_R, [0.025, 0.975])
    return Interval(mean, float(low), float(high))


def tested_on(record: RunRecord) -> str | None:
    data = setting(record, "data")
    return data.get("test_benchmark") or data.get("benchmark")
