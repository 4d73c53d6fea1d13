"""The arms of a set of runs compared: estimates, differences from a baseline, and readings at matched accuracy.

Two kinds of chance are kept apart. An interval over problems covers the choice of test problems, for the very
policies that were trained. The noise of training shows over seeds (Student's t) only: they alone decide whether a
difference is shown, corrected for the number of differences. One run has the distance between two trainings of its
baseline (``replicate_baseline``) instead, which gives a scale and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_edo.config.arms import PLAIN_LABELS
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import (
    START,
    Evaluation,
    compared_metrics,
    metric_order,
    newly_solved_and_lost,
    paired_interval,
    plain_name,
    seeds_interval,
)
from nemo_edo.metrics import Interval, holm, mean_p_value
from nemo_edo.report.matching import MATCHED_MEASURES, curve, match_accuracy
from nemo_edo.report.run_record import setting
from nemo_edo.report.run_set import RunSet, Trained

SOLVED_METRIC = "greedy_accuracy"
LEVEL = 0.05
"""Of the p-value, corrected by Holm's method, below which a difference is shown."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    by_seed: dict[int, float]
    interval: Interval
    """Over problems in a set of one run, over seeds (Student's t) in a set of several; its ends are NaN where one seed
    of several runs leaves them open."""

    @classmethod
    def over_seeds(cls, metric: str, by_seed: Mapping[int, float], *, differences: bool = False) -> Estimate | None:
        """Of a metric, or of its ``differences``; None where there is no seed."""
        if not by_seed:
            return None
        return cls(dict(by_seed), seeds_interval(metric, list(by_seed.values()), differences=differences))

    @property
    def known(self) -> bool:
        """Whether it has an interval."""
        return math.isfinite(self.interval.low)

    @property
    def band(self) -> tuple[float, float]:
        """What a chart shades: from the lowest to the highest seed, or one run's interval."""
        values = self.by_seed.values()
        return (min(values), max(values)) if len(values) > 1 else (self.interval.low, self.interval.high)


@dataclass(frozen=True)
class Difference(Estimate):
    """arm - baseline, in the seeds that both were trained with."""

    arm: str
    metric: str
    over_problems: Interval
    """Over all seeds together, with its paired interval over problems."""
    p_value: float
    """Two-sided, of a mean of 0 over seeds (paired t test); NaN with one seed."""
    p_adjusted: float
    """The same by Holm's method for all the differences of the report that have one."""

    @property
    def shown(self) -> bool:
        """Whether the seeds show that it is not 0; never with one."""
        return self.p_adjusted < LEVEL


@dataclass(frozen=True)
class Replicate:
    """A second training of an arm with other samples, in each run that has one."""

    label: str
    """The label of the arm."""
    table: dict[str, Estimate]
    """metric -> its values."""
    noise: dict[str, float]
    """metric -> the distance between the two trainings, as root mean square over the runs."""


@dataclass(frozen=True)
class Changes:
    """Test problems, greedy, on average over seeds: wrong before and right after, and the other way round."""

    newly_solved: float
    lost: float
    seeds: int


@dataclass(frozen=True)
class MatchedArms:
    """Every arm read over one range of sampled training accuracies, separately in each seed
    (``matching.match_accuracy``)."""

    accuracies: dict[int, float]
    """The middle of the range by seed; seeds in which fewer than two arms can be matched are left out."""
    values: dict[str, dict[str, Estimate]]
    """measure -> arm -> its values."""
    differences: dict[str, dict[str, Estimate]]
    """measure -> arm -> its values minus the baseline's in the same seeds."""
    last: dict[str, dict[str, Estimate]]
    """measure -> arm -> its values at its last collection, at whatever accuracy that had."""
    left_out: dict[str, dict[int, str]]
    """arm -> seed -> why it has no value there."""


@dataclass(frozen=True)
class Comparison:
    """Everything that a report says in numbers."""

    runs: RunSet
    labels: dict[str, str]
    """Arm -> label of everything in the table: the start, where it was evaluated, and the trained arms."""
    metrics: tuple[str, ...]
    table: dict[str, dict[str, Estimate | None]]
    """arm -> metric -> estimate."""
    baseline: str | None
    replicate: Replicate | None
    differences: tuple[Difference, ...]
    from_start: dict[str, Changes]
    from_baseline: dict[str, Changes]
    matched: MatchedArms
    problems: int

    @property
    def arms(self) -> dict[str, dict[int, Trained]]:
        """The trained arms (``RunSet.arms``)."""
        return self.runs.arms

    @property
    def seeds(self) -> list[int]:
        return self.runs.seeds

    @property
    def temperature(self) -> float:
        """Of the evaluations' sampled responses, where a metric's name has no other."""
        return next(iter(self.runs.records[0].evaluations.values())).temperature

    @property
    def temperature_named(self) -> bool:
        """Whether some metrics' names have another temperature."""
        return any(plain_name(metric) != metric for metric in self.metrics)

    @property
    def is_one(self) -> bool:
        """Whether intervals are over problems, as those of one run are."""
        return self.runs.is_one

    def difference(self, arm: str, metric: str) -> Difference | None:
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)

    def seeds_of(self, arm: str) -> list[int]:
        return sorted(self.arms[arm] if arm in self.arms else self.runs.starts)


BySeed = Mapping[int, Evaluation]
Values = dict[str, dict[str, dict[int, float]]]
"""measure -> arm -> seed -> value."""


def compare(runs: RunSet, baseline: str | None = None) -> Comparison:
    """Compares every arm with the baseline.

    baseline: the label (in one run also the name) of an arm; None: one run's own baseline, and of several runs the
    first arm that is plain GRPO or ETO, or the first arm where none is. An arm alone is compared with its start, where
    that was evaluated. Raises UserError for a baseline that is not an arm.
    """
    evaluations = {START: runs.starts} if runs.starts else {}
    evaluations |= {arm: {seed: t.evaluation for seed, t in by_seed.items()} for arm, by_seed in runs.arms.items()}
    labels = {arm: runs.labels.get(arm) or runs.records[0].label(arm) for arm in evaluations}
    baseline = _baseline(runs, baseline)
    found = {name for by_seed in evaluations.values() for one in by_seed.values() for name in one.metrics}
    metrics = tuple(sorted(found, key=metric_order))
    first = next(iter(evaluations.values()))
    return Comparison(
        runs=runs,
        labels=labels,
        metrics=metrics,
        table={
            arm: {metric: found.get(metric) for metric in metrics}
            for arm, by_seed in evaluations.items()
            for found in [_estimates(runs, by_seed, metrics)]
        },
        baseline=baseline,
        replicate=_replicate(runs, metrics),
        differences=_differences(runs, evaluations, baseline, compared_metrics(metrics)),
        from_start={arm: one for arm in runs.arms if (one := _changes(evaluations, START, arm))},
        from_baseline={
            arm: one
            for arm in runs.arms
            if baseline in runs.arms and arm != baseline and (one := _changes(evaluations, baseline, arm))
        },
        matched=_matched(runs, baseline),
        problems=len(next(iter(first.values())).problems),
    )


def _baseline(runs: RunSet, wanted: str | None) -> str | None:
    if wanted is not None:
        named = [arm for arm, label in runs.labels.items() if wanted in (arm, label)]
        if not named:
            raise UserError(f"--baseline: there is no arm {wanted!r}; the arms are {'; '.join(runs.labels.values())}")
        return named[0]
    if len(runs.arms) < 2:
        return START if runs.starts and runs.arms else None
    if runs.is_one:
        own = runs.records[0].summary["baseline"]
        if own is not None and own not in runs.arms:
            raise UserError(
                f"{runs.records[0].folder / 'summary.json'}: the baseline {own!r} is not an arm; the arms are "
                f"{', '.join(runs.arms)}"
            )
        return own
    plain = [arm for arm, by_seed in runs.arms.items() if next(iter(by_seed.values())).settings.label in PLAIN_LABELS]
    return (plain or list(runs.arms))[0]


def _over_problems(runs: RunSet) -> dict[str, Any]:
    """The settings of intervals over problems."""
    return {
        "resamples": setting(runs.records[0], "evaluation.bootstrap"),
        "seed": runs.seeds[0] if runs.is_one else 0,
    }


def _values(by_seed: BySeed, metric: str) -> dict[int, float]:
    return {seed: found.mean(metric) for seed, found in sorted(by_seed.items()) if found.has(metric)}


def _estimates(runs: RunSet, by_seed: BySeed, metrics: Sequence[str]) -> dict[str, Estimate]:
    """Of the metrics that were measured."""
    values = {metric: found for metric in metrics if (found := _values(by_seed, metric))}
    if not runs.is_one:
        return {metric: Estimate.over_seeds(metric, found) for metric, found in values.items()}
    [only] = by_seed.values()
    intervals = only.intervals(**_over_problems(runs))
    return {metric: Estimate(found, intervals[metric]) for metric, found in values.items()}


def _differences(
    runs: RunSet, evaluations: Mapping[str, BySeed], baseline: str | None, metrics: Sequence[str]
) -> tuple[Difference, ...]:
    found = [
        difference
        for arm in runs.arms
        if baseline not in (None, arm)
        for metric in metrics
        if (difference := _difference(runs, arm, metric, evaluations[arm], evaluations[baseline]))
    ]
    adjusted = iter(holm([one.p_value for one in found if not math.isnan(one.p_value)]))
    return tuple(one if math.isnan(one.p_value) else replace(one, p_adjusted=float(next(adjusted))) for one in found)


def _difference(runs: RunSet, arm: str, metric: str, ours: BySeed, theirs: BySeed) -> Difference | None:
    values, base = _values(ours, metric), _values(theirs, metric)
    by_seed = {seed: value - base[seed] for seed, value in values.items() if seed in base}
    if not by_seed:
        return None
    a, b = (_pooled(evaluations, metric, list(by_seed)) for evaluations in (ours, theirs))
    over_problems = paired_interval(metric, a, b, **_over_problems(runs))
    values = list(by_seed.values())
    interval = over_problems if runs.is_one else seeds_interval(metric, values, differences=True)
    return Difference(by_seed, interval, arm, metric, over_problems, mean_p_value(values), p_adjusted=math.nan)


def _replicate(runs: RunSet, metrics: Sequence[str]) -> Replicate | None:
    records = [record for record in runs.records if record.replicate is not None]
    if not records:
        return None
    noise = {}
    for metric in metrics:
        pairs = [(record, record.replicate, record.evaluations[record.summary["baseline"]]) for record in records]
        pairs = [pair for pair in pairs if all(one.has(metric) for one in pair[1:])]
        if pairs:
            apart = [again.mean(metric) - first.mean(metric) for _, again, first in pairs]
            noise[metric] = math.sqrt(sum(gap**2 for gap in apart) / len(apart))
    table = _estimates(runs, {record.seed: record.replicate for record in records}, metrics)
    return Replicate(records[0].label(records[0].summary["baseline"]), table, noise)


def _pooled(by_seed: BySeed, metric: str, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(sums [P], counts [P]) of the seeds together."""
    sums, counts = zip(*(by_seed[seed].metrics[metric] for seed in seeds), strict=True)
    return np.sum(sums, axis=0), np.sum(counts, axis=0)


def _changes(evaluations: Mapping[str, BySeed], before: str, after: str) -> Changes | None:
    old, new = evaluations.get(before, {}), evaluations[after]
    seeds = [seed for seed in new if seed in old and old[seed].has(SOLVED_METRIC) and new[seed].has(SOLVED_METRIC)]
    if not seeds:
        return None
    found = [newly_solved_and_lost(old[seed], new[seed]) for seed in seeds]
    newly_solved, lost = (sum(change[key] for change in found) / len(seeds) for key in ("newly_solved", "lost"))
    return Changes(newly_solved, lost, len(seeds))


def _matched(runs: RunSet, baseline: str | None) -> MatchedArms:
    accuracies: dict[int, float] = {}
    left_out: dict[str, dict[int, str]] = {}
    values, last = ({measure: {arm: {} for arm in runs.arms} for measure in MATCHED_MEASURES} for _ in range(2))
    for seed in runs.seeds:
        curves = {arm: curve(found[seed].record, found[seed].name) for arm, found in runs.arms.items() if seed in found}
        matched = match_accuracy(curves)
        for arm, reason in matched.reasons.items():
            left_out.setdefault(arm, {})[seed] = reason
        _add(last, matched.last, seed)
        if matched.accuracy is not None:
            accuracies[seed] = matched.accuracy
            _add(values, matched.values, seed)
    differences = {
        measure: {
            arm: {seed: value - by_arm[baseline][seed] for seed, value in by_seed.items() if seed in by_arm[baseline]}
            for arm, by_seed in by_arm.items()
            if arm != baseline and baseline in by_arm
        }
        for measure, by_arm in values.items()
    }
    apart = _over_seeds(differences, differences=True)
    return MatchedArms(accuracies, _over_seeds(values), apart, _over_seeds(last), left_out)


def _add(values: Values, found: Mapping[str, Mapping[str, float]], seed: int) -> None:
    for measure, by_arm in found.items():
        for arm, value in by_arm.items():
            if math.isfinite(value):
                values[measure][arm][seed] = value


def _over_seeds(values: Values, *, differences: bool = False) -> dict[str, dict[str, Estimate]]:
    return {
        measure: {
            arm: found
            for arm, by_seed in by_arm.items()
            if (found := Estimate.over_seeds(measure, by_seed, differences=differences))
        }
        for measure, by_arm in values.items()
    }
