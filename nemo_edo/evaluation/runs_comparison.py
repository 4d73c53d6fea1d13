"""The arms of several runs beside each other: means over seeds, and differences from a baseline paired by seed.

Two kinds of chance are kept apart. Student's t interval over seeds covers the luck of training; the bootstrap and the
permutation test over problems cover the choice of test problems, for the very policies that were trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import (
    MATCHED_MEASURES,
    PLAIN_LABELS,
    START,
    START_LABEL,
    Difference,
    Evaluation,
    main_metrics,
    match_accuracy,
    metric_order,
    newly_solved_and_lost,
)
from nemo_edo.evaluation.run_record import curve, setting
from nemo_edo.evaluation.run_set import RunSet, Trained
from nemo_edo.metrics import Interval, holm, mean_interval, paired_bootstrap, paired_permutation_test

SOLVED_METRIC = "greedy_accuracy"


@dataclass(frozen=True)
class OverSeeds:
    """A number of each seed, and their mean with its t interval; the ends are NaN where there is one seed."""

    by_seed: dict[int, float]
    interval: Interval

    @classmethod
    def of(cls, by_seed: Mapping[int, float]) -> OverSeeds | None:
        """None where there is no seed."""
        return cls(dict(by_seed), mean_interval(list(by_seed.values()))) if by_seed else None

    @property
    def known(self) -> bool:
        """Whether there are seeds enough for an interval."""
        return len(self.by_seed) > 1


@dataclass(frozen=True)
class SeedDifference:
    """arm - baseline, for the seeds that both were trained with."""

    arm: str
    metric: str
    over_seeds: OverSeeds
    over_problems: Interval
    """Of the seeds together, with its paired bootstrap interval over problems."""
    p_value: float
    """Two-sided, of a permutation test over problems."""
    p_adjusted: float
    """The same by Holm's method for all the differences of the report."""

    @property
    def over_seeds_only(self) -> Difference:
        """The difference with its interval over seeds, for the words that judge it."""
        return Difference(self.arm, self.metric, self.over_seeds.interval)

    @property
    def exceeds_interval(self) -> bool:
        """Whether the 95 % interval over seeds leaves zero out; never with one seed."""
        return self.over_seeds_only.exceeds_interval


@dataclass(frozen=True)
class Changes:
    """Test problems, greedy, on average over seeds: wrong before and right after, and the other way round."""

    newly_solved: float
    lost: float
    seeds: int


@dataclass(frozen=True)
class MatchedSeeds:
    """Every arm read at one sampled training accuracy, separately for each seed (``comparison.match_accuracy``)."""

    accuracies: dict[int, float]
    """By seed; seeds in which fewer than two arms can be matched are left out."""
    values: dict[str, dict[str, OverSeeds]]
    """measure -> arm -> its values."""
    differences: dict[str, dict[str, OverSeeds]]
    """measure -> arm -> its values minus the baseline's in the same seeds."""
    left_out: dict[str, dict[int, str]]
    """arm -> seed -> why it has no value there."""


@dataclass(frozen=True)
class RunsComparison:
    """Everything that the report of several runs says in numbers."""

    labels: tuple[str, ...]
    """The start, where it was evaluated, and the trained arms."""
    arms: dict[str, dict[int, Trained]]
    metrics: tuple[str, ...]
    table: dict[str, dict[str, OverSeeds | None]]
    baseline: str | None
    differences: tuple[SeedDifference, ...]
    from_start: dict[str, Changes]
    from_baseline: dict[str, Changes]
    matched: MatchedSeeds
    problems: int
    seeds: tuple[int, ...]
    runs: int

    def difference(self, arm: str, metric: str) -> SeedDifference | None:
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)

    def seeds_of(self, label: str) -> list[int]:
        return sorted(self.arms[label]) if label in self.arms else list(self.seeds)


def compare_runs(runs: RunSet, baseline: str | None = None) -> RunsComparison:
    """Puts the arms of all runs beside each other.

    baseline: the label of the arm to compare with; None: the first that is plain GRPO or ETO, the first arm where
    none is, and the start where there is one arm alone. Raises UserError for a label that no arm has.
    """
    evaluations = {
        arm: {seed: found.evaluation for seed, found in by_seed.items()} for arm, by_seed in runs.arms.items()
    }
    starts = {
        record.summary["seed"]: record.evaluations[START] for record in runs.records if START in record.evaluations
    }
    if starts:
        evaluations = {START_LABEL: starts, **evaluations}
    baseline = _baseline(runs, baseline, bool(starts))
    metrics = {name for by_seed in evaluations.values() for found in by_seed.values() for name in found.metrics}
    ordered = tuple(sorted(metrics, key=metric_order))
    first = next(iter(evaluations.values()))
    return RunsComparison(
        labels=tuple(evaluations),
        arms=runs.arms,
        metrics=ordered,
        table={
            arm: {metric: OverSeeds.of(_values(by_seed, metric)) for metric in ordered}
            for arm, by_seed in evaluations.items()
        },
        baseline=baseline,
        differences=_differences(evaluations, runs, baseline, main_metrics(ordered)),
        from_start={arm: found for arm in runs.arms if (found := _changes(evaluations, START_LABEL, arm))},
        from_baseline={
            arm: found
            for arm in runs.arms
            if arm != baseline and baseline in runs.arms and (found := _changes(evaluations, baseline, arm))
        },
        matched=_matched(runs, baseline),
        problems=len(next(iter(first.values())).problems),
        seeds=tuple(runs.seeds),
        runs=len(runs.records),
    )


def _baseline(runs: RunSet, wanted: str | None, has_start: bool) -> str | None:
    if wanted is not None:
        if wanted not in runs.arms:
            raise UserError(f"--baseline: there is no arm {wanted!r}; the arms are {'; '.join(runs.arms)}")
        return wanted
    if len(runs.arms) < 2:
        return START_LABEL if has_start and runs.arms else None
    plain = [arm for arm, by_seed in runs.arms.items() if next(iter(by_seed.values())).settings.label in PLAIN_LABELS]
    return (plain or list(runs.arms))[0]


def _values(by_seed: Mapping[int, Evaluation], metric: str) -> dict[int, float]:
    return {
        seed: float(found.metrics[metric][0].sum() / found.metrics[metric][1].sum())
        for seed, found in sorted(by_seed.items())
        if found.has(metric)
    }


def _differences(
    evaluations: Mapping[str, Mapping[int, Evaluation]], runs: RunSet, baseline: str | None, metrics: list[str]
) -> tuple[SeedDifference, ...]:
    resamples = setting(runs.records[0], "evaluation.bootstrap")
    found = [
        difference
        for arm in runs.arms
        if baseline not in (None, arm)
        for metric in metrics
        if (difference := _difference(arm, metric, evaluations[arm], evaluations[baseline], resamples))
    ]
    adjusted = holm([difference.p_value for difference in found])
    return tuple(replace(difference, p_adjusted=float(p)) for difference, p in zip(found, adjusted, strict=True))


def _difference(
    arm: str, metric: str, ours: Mapping[int, Evaluation], theirs: Mapping[int, Evaluation], resamples: int
) -> SeedDifference | None:
    seeds = [seed for seed in sorted(ours) if seed in theirs and ours[seed].has(metric) and theirs[seed].has(metric)]
    if not seeds:
        return None
    values, base = _values(ours, metric), _values(theirs, metric)
    a, b = _pooled(ours, metric, seeds), _pooled(theirs, metric, seeds)
    measured_P = (a[1] > 0) & (b[1] > 0)
    means_a, means_b = (sums[measured_P] / counts[measured_P] for sums, counts in (a, b))
    return SeedDifference(
        arm,
        metric,
        OverSeeds.of({seed: values[seed] - base[seed] for seed in seeds}),
        paired_bootstrap(*a, *b, resamples=resamples, seed=0),
        paired_permutation_test(means_a, means_b) if measured_P.any() else 1.0,
        math.nan,
    )


def _pooled(by_seed: Mapping[int, Evaluation], metric: str, seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(sums [P], counts [P]) of the seeds together."""
    sums, counts = zip(*(by_seed[seed].metrics[metric] for seed in seeds), strict=True)
    return np.sum(sums, axis=0), np.sum(counts, axis=0)


def _changes(evaluations: Mapping[str, Mapping[int, Evaluation]], before: str, after: str) -> Changes | None:
    old, new = evaluations.get(before, {}), evaluations[after]
    seeds = [seed for seed in new if seed in old and old[seed].has(SOLVED_METRIC) and new[seed].has(SOLVED_METRIC)]
    if not seeds:
        return None
    found = [newly_solved_and_lost(old[seed], new[seed]) for seed in seeds]
    return Changes(
        sum(change["newly_solved"] for change in found) / len(seeds),
        sum(change["lost"] for change in found) / len(seeds),
        len(seeds),
    )


def _matched(runs: RunSet, baseline: str | None) -> MatchedSeeds:
    accuracies: dict[int, float] = {}
    left_out: dict[str, dict[int, str]] = {}
    values = {measure: {arm: {} for arm in runs.arms} for measure in MATCHED_MEASURES}
    for seed in runs.seeds:
        curves = {arm: curve(found[seed].record, found[seed].name) for arm, found in runs.arms.items() if seed in found}
        matched = match_accuracy(curves)
        for arm, reason in matched.reasons.items():
            left_out.setdefault(arm, {})[seed] = reason
        if matched.accuracy is None:
            continue
        accuracies[seed] = matched.accuracy
        for measure, by_arm in matched.values.items():
            for arm, value in by_arm.items():
                if math.isfinite(value):
                    values[measure][arm][seed] = value
    return MatchedSeeds(accuracies, _over_seeds(values), _over_seeds(_apart(values, baseline)), left_out)


def _apart(values: dict[str, dict[str, dict[int, float]]], baseline: str | None) -> dict[str, dict[str, dict]]:
    return {
        measure: {
            arm: {seed: value - by_arm[baseline][seed] for seed, value in by_seed.items() if seed in by_arm[baseline]}
            for arm, by_seed in by_arm.items()
            if arm != baseline and baseline in by_arm
        }
        for measure, by_arm in values.items()
    }


def _over_seeds(values: dict[str, dict[str, dict[int, float]]]) -> dict[str, dict[str, OverSeeds]]:
    return {
        measure: {arm: found for arm, by_seed in by_arm.items() if (found := OverSeeds.of(by_seed))}
        for measure, by_arm in values.items()
    }
