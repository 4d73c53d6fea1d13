"""The arms of a set of runs compared: estimates, differences from a baseline, and readings at matched accuracy.

Two kinds of chance are kept apart. An interval over problems covers the choice of test problems, for the very
policies that were trained. The noise of training shows over seeds (Student's t) only: they alone decide whether a
difference is shown, corrected for the number of differences. One run has the distance between two trainings of its
baseline (``replicate_baseline``) instead, which gives a scale and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nemo_edo.config.arms import PLAIN_LABELS, REPLICATE
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import (
    START,
    compared_metrics,
    metric_order,
    newly_solved_and_lost,
    paired_interval,
    plain_name,
    seeds_interval,
)
from nemo_edo.metrics import Interval, holm, mean_p_value
from nemo_edo.report.matching import MATCHED_MEASURES, match_accuracy
from nemo_edo.report.run_record import setting
from nemo_edo.report.run_set import RunSet, Trained

SOLVED_METRIC = "greedy_accuracy"
LEVEL = 0.05
"""Of the p-value, corrected by Holm's method, below which a difference is shown."""
BySeed = Mapping[int, Trained]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    by_seed: dict[int, float]
    interval: Interval
    """Over problems in a set of one run, over seeds (Student's t) in a set of several; its ends are NaN where one seed
    of several runs leaves them open."""

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
    p_adjusted: float = math.nan
    """The same by Holm's method for all the differences of the report that have one."""

    @property
    def shown(self) -> bool:
        """Whether the seeds show that it is not 0; never with one."""
        return self.p_adjusted < LEVEL


class Changes(NamedTuple):
    """Test problems, greedy, on average over seeds: wrong before and right after, and the other way round."""

    newly_solved: float
    lost: float


Cells = dict[str, dict[str, Estimate]]
"""measure -> arm -> its values."""


@dataclass(frozen=True)
class MatchedArms:
    """Every arm read over one range of sampled training accuracies, separately in each seed
    (``matching.match_accuracy``)."""

    accuracies: dict[int, float]
    """The middle of the range by seed; seeds in which fewer than two arms can be matched are left out."""
    values: Cells
    differences: Cells
    """An arm's values minus the baseline's in the same seeds."""
    last: Cells
    """An arm's values at its last collection, at whatever accuracy that had."""
    left_out: dict[str, dict[int, str]]
    """arm -> seed -> why it has no value there."""


@dataclass(frozen=True)
class Comparison:
    """Everything that a report says in numbers."""

    runs: RunSet
    labels: dict[str, str]
    """Policy -> label: the start, where it was evaluated, and the trained arms."""
    metrics: tuple[str, ...]
    table: dict[str, dict[str, Estimate]]
    """policy -> metric -> estimate, of what was measured. It has the replicate, too."""
    baseline: str | None
    replicate: str | None
    """The label of the baseline, where some run trained it again with other samples."""
    noise: dict[str, float]
    """metric -> the distance between the two trainings, as root mean square over the runs."""
    differences: tuple[Difference, ...]
    from_start: dict[str, Changes]
    from_baseline: dict[str, Changes]
    matched: MatchedArms

    @property
    def arms(self) -> dict[str, dict[int, Trained]]:
        """The trained arms (``RunSet.arms``)."""
        return self.runs.arms

    @property
    def seeds(self) -> list[int]:
        return self.runs.seeds

    @property
    def problems(self) -> int:
        return len(next(iter(self.runs.records[0].evaluations.values())).problems)

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

    def cell(self, policy: str, metric: str) -> Estimate | None:
        return self.table[policy].get(metric)

    def difference(self, arm: str, metric: str) -> Difference | None:
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)

    def seeds_of(self, policy: str) -> list[int]:
        return sorted(self.runs.policies[policy])


def compare(runs: RunSet, baseline: str | None = None) -> Comparison:
    """Compares every arm with the baseline.

    baseline: the label (in one run also the name) of an arm; None: one run's own baseline, and of several runs the
    first arm that is plain GRPO or ETO, or the first arm where none is. An arm alone is compared with its start, where
    that was evaluated. Raises UserError for a baseline that is not an arm.
    """
    policies, first = runs.policies, runs.records[0]
    baseline = _baseline(runs, baseline)
    evaluated = [one.evaluation for name, found in policies.items() if name != REPLICATE for one in found.values()]
    metrics = tuple(sorted({metric for one in evaluated for metric in one.metrics}, key=metric_order))
    return Comparison(
        runs=runs,
        labels={name: runs.labels.get(name) or first.label(name) for name in policies if name != REPLICATE},
        metrics=metrics,
        table={name: _estimates(runs, found, metrics) for name, found in policies.items()},
        baseline=baseline,
        replicate=_replicated(policies[REPLICATE].values())[0].settings.label if REPLICATE in policies else None,
        noise=_noise(policies.get(REPLICATE, {}), metrics),
        differences=_differences(runs, baseline, compared_metrics(metrics)),
        from_start=_changes(policies, START),
        from_baseline=_changes(policies, baseline) if baseline in runs.arms else {},
        matched=_matched(runs, baseline),
    )


def _baseline(runs: RunSet, wanted: str | None) -> str | None:
    if wanted is not None:
        named = [arm for arm, label in runs.labels.items() if wanted in (arm, label)]
        if not named:
            raise UserError(f"--baseline: there is no arm {wanted!r}; the arms are {'; '.join(runs.labels.values())}")
        return named[0]
    if len(runs.arms) < 2:
        return START if START in runs.policies and runs.arms else None
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


def _values(found: BySeed, metric: str) -> dict[int, float]:
    return {seed: one.evaluation.mean(metric) for seed, one in sorted(found.items()) if one.evaluation.has(metric)}


def _over_seeds(metric: str, values: Mapping[int, float], *, differences: bool = False) -> Estimate:
    return Estimate(dict(values), seeds_interval(metric, list(values.values()), differences=differences))


def _estimates(runs: RunSet, found: BySeed, metrics: Sequence[str]) -> dict[str, Estimate]:
    """Of the metrics that were measured."""
    values = {metric: by_seed for metric in metrics if (by_seed := _values(found, metric))}
    if not runs.is_one:
        return {metric: _over_seeds(metric, by_seed) for metric, by_seed in values.items()}
    [only] = found.values()
    intervals = only.evaluation.intervals(**_over_problems(runs))
    return {metric: Estimate(by_seed, intervals[metric]) for metric, by_seed in values.items()}


def _differences(runs: RunSet, baseline: str | None, metrics: Sequence[str]) -> tuple[Difference, ...]:
    found, policies = [], runs.policies
    for arm in runs.arms if baseline is not None else ():
        for metric in metrics if arm != baseline else ():
            ours, theirs = (_values(policies[name], metric) for name in (arm, baseline))
            by_seed = {seed: value - theirs[seed] for seed, value in ours.items() if seed in theirs}
            if not by_seed:
                continue
            pooled = [_pooled(policies[name], metric, by_seed) for name in (arm, baseline)]
            over_problems = paired_interval(metric, *pooled, **_over_problems(runs))
            interval = over_problems if runs.is_one else _over_seeds(metric, by_seed, differences=True).interval
            p_value = mean_p_value(list(by_seed.values()))
            found.append(Difference(by_seed, interval, arm, metric, over_problems, p_value))
    adjusted = iter(holm([one.p_value for one in found if not math.isnan(one.p_value)]))
    return tuple(one if math.isnan(one.p_value) else replace(one, p_adjusted=float(next(adjusted))) for one in found)


def _pooled(found: BySeed, metric: str, seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """(sums [P], counts [P]) of the seeds together."""
    sums, counts = zip(*(found[seed].evaluation.metrics[metric] for seed in seeds), strict=True)
    return np.sum(sums, axis=0), np.sum(counts, axis=0)


def _replicated(again: Iterable[Trained]) -> list[Trained]:
    """The baselines that the replicates repeat."""
    return [Trained(one.record, one.record.summary["baseline"]) for one in again]


def _noise(again: BySeed, metrics: Sequence[str]) -> dict[str, float]:
    pairs = list(zip(again.values(), _replicated(again.values()), strict=True))
    noise = {}
    for metric in metrics:
        apart = [a.evaluation.mean(metric) - b.evaluation.mean(metric) for a, b in pairs]  # NaN where one lacks it
        known = [gap for gap in apart if math.isfinite(gap)]
        if known:
            noise[metric] = math.sqrt(sum(gap**2 for gap in known) / len(known))
    return noise


def _changes(policies: Mapping[str, BySeed], before: str) -> dict[str, Changes]:
    """Of every other arm, since ``before``; without those that have no seed where both were measured."""
    found = {}
    old = {seed: one.evaluation for seed, one in policies.get(before, {}).items() if one.evaluation.has(SOLVED_METRIC)}
    for arm in (name for name in policies if name not in (START, REPLICATE, before)):
        new = {seed: one.evaluation for seed, one in policies[arm].items() if one.evaluation.has(SOLVED_METRIC)}
        changes = [newly_solved_and_lost(old[seed], new[seed]) for seed in new if seed in old]
        if changes:
            found[arm] = Changes(*(sum(one[key] for one in changes) / len(changes) for key in ("newly_solved", "lost")))
    return found


def _matched(runs: RunSet, baseline: str | None) -> MatchedArms:
    accuracies: dict[int, float] = {}
    left_out: dict[str, dict[int, str]] = {}
    values, last = [], []
    for seed in runs.seeds:
        collections = {arm: found[seed].lines("collection") for arm, found in runs.arms.items() if seed in found}
        curves = {arm: lines[["reward", *MATCHED_MEASURES]].to_numpy(float) for arm, lines in collections.items()}
        matched = match_accuracy(curves)
        for arm, reason in matched.reasons.items():
            left_out.setdefault(arm, {})[seed] = reason
        if matched.accuracy is not None:
            accuracies[seed] = matched.accuracy
        values += [(arm, seed, *found) for arm, found in matched.values.items()]
        last += [(arm, seed, *curve[-1, 1:]) for arm, curve in curves.items() if len(curve) and len(curves) > 1]
    matched, at_end = (pd.DataFrame(rows, columns=["arm", "seed", *MATCHED_MEASURES]) for rows in (values, last))
    base = matched[matched["arm"] == baseline].set_index("seed")
    apart = matched[(matched["arm"] != baseline) & matched["seed"].isin(base.index)].copy()
    for measure in MATCHED_MEASURES:
        apart[measure] -= apart["seed"].map(base[measure])
    cells = _cells(runs, matched), _cells(runs, apart, differences=True), _cells(runs, at_end)
    return MatchedArms(accuracies, *cells, left_out)


def _cells(runs: RunSet, table: pd.DataFrame, *, differences: bool = False) -> Cells:
    """Of each arm the measures that it has in some seed. table: columns arm, seed and the measures."""
    cells: Cells = {measure: {} for measure in MATCHED_MEASURES}
    for measure in MATCHED_MEASURES:
        for arm in runs.arms:
            by_seed = table[table["arm"] == arm].set_index("seed")[measure].dropna().to_dict()
            if by_seed:
                cells[measure][arm] = _over_seeds(measure, by_seed, differences=differences)
    return cells
