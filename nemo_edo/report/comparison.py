"""The arms of a set of runs compared: estimates, differences from a baseline, and readings at matched accuracy.

Two kinds of chance are kept apart. An interval over problems covers the choice of test problems, for the very
policies that were trained. The noise of training shows over seeds (Student's t) only: they alone decide whether a
difference is shown, corrected for the number of differences. One run has the distance between two trainings of its
baseline (``replicate_baseline``) instead, which gives a scale and decides nothing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from nemo_edo.config.run import PLAIN_LABELS
from nemo_edo.errors import UserError
from nemo_edo.evaluation import results
from nemo_edo.evaluation.results import Evaluation
from nemo_edo.metrics import Interval, detectable, holm, mean_p_value
from nemo_edo.report.matching import MATCHED_MEASURES, match_accuracy
from nemo_edo.report.run_set import RunSet, Trained, setting

SOLVED_METRIC = "greedy_accuracy"
LEVEL = 0.05
"""A difference is shown where its p-value, corrected by Holm's method, is smaller."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    by_seed: dict[int, float]
    interval: Interval
    """The interval over problems in a set of one run, over seeds (Student's t) in a set of several; its ends are NaN
    where one seed of several runs leaves them open."""

    @property
    def known(self) -> bool:
        return math.isfinite(self.interval.low)


@dataclass(frozen=True)
class Difference(Estimate):
    """arm - baseline, in the seeds that both were trained with."""

    arm: str
    metric: str
    over_problems: Interval
    """The difference over all seeds together, with its paired interval over problems."""
    p_value: float
    """Two-sided, of a mean of 0 over seeds (paired t test); NaN with one seed."""
    p_adjusted: float
    """The p-value corrected by Holm's method for all the differences of the report that have one."""
    detectable: float
    """The least true difference that these seeds show with probability 0.8, at the level of the strictest of the
    report's tests; NaN with one seed."""

    @property
    def shown(self) -> bool:
        return self.p_adjusted < LEVEL


Cells = dict[str, dict[str, Estimate]]


@dataclass(frozen=True)
class MatchedArms:
    """Every arm read over one range of sampled training accuracies, separately in each seed
    (``matching.match_accuracy``)."""

    accuracies: dict[int, float]
    values: Cells
    differences: Cells
    """An arm's values minus the baseline's in the same seeds."""
    last: Cells
    """An arm's values at its last collection, at whatever accuracy that had."""
    left_out: dict[str, dict[int, str]]


@dataclass(frozen=True)
class Comparison:
    """Everything that a report says in numbers."""

    runs: RunSet
    arms: dict[str, dict[int, Trained]]
    seeds: list[int]
    is_one: bool
    """Whether there is one run."""
    problems: int
    temperature: float
    """The temperature of the sampled responses, where a metric's name has no other."""
    labels: dict[str, str]
    metrics: tuple[str, ...]
    table: dict[str, dict[str, Estimate]]
    """policy -> metric -> estimate, of what was measured. It has the replicate, too."""
    baseline: str | None
    replicate: str | None
    """The label of the baseline, where some run trained it again with other samples."""
    noise: dict[str, float]
    """metric -> the distance between the two trainings, as root mean square over the runs."""
    differences: tuple[Difference, ...]
    from_start: dict[str, dict[str, float]]
    """arm -> the numbers of test problems, greedy, on average over seeds: newly_solved, wrong before and right after,
    and lost, the other way round."""
    from_baseline: dict[str, dict[str, float]]
    matched: MatchedArms

    def cell(self, policy: str, metric: str) -> Estimate | None:
        return self.table[policy].get(metric)

    def difference(self, arm: str, metric: str) -> Difference | None:
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)


def compare(runs: RunSet, baseline: str | None = None) -> Comparison:
    """Compares every arm with the baseline.

    baseline: the label (in one run also the name) of an arm; None: one run's own baseline, and of several runs the
    first arm that is plain GRPO or ETO, or the first arm where none is. An arm alone is compared with its start, where
    that was evaluated. Raises UserError for a baseline that is not an arm.
    """
    policies, first, baseline = runs.policies, runs.records[0], _baseline(runs, baseline)
    compared = [name for name in policies if name in (results.START, *runs.arms)]  # all but the baseline's replicate
    evaluated = [one.evaluation for name in compared for one in policies[name].values()]
    metrics = tuple(sorted({metric for one in evaluated for metric in one.metrics}, key=results.metric_order))
    bootstrap = setting(first, "evaluation.bootstrap")
    over_problems = {"resamples": bootstrap, "seed": runs.seeds[0] if runs.is_one else 0}
    table: dict[str, dict[str, Estimate]] = {}
    for name, found in policies.items():
        if name == results.START:  # trainings with other samples can begin from one warm-up, which counts once
            found = {one.record.warm_up_seed: one for one in found.values()}
        evaluations = {seed: found[seed].evaluation for seed in sorted(found)}
        by_metric = {metric: {seed: one for seed, one in evaluations.items() if one.has(metric)} for metric in metrics}
        values = {m: {seed: one.mean(m) for seed, one in having.items()} for m, having in by_metric.items() if having}
        if runs.is_one:
            intervals = next(iter(found.values())).evaluation.intervals(**over_problems)
        else:
            intervals = {
                metric: results.seeds_interval(
                    metric, [*by_seed.values()], rounding=_coarsest(by_metric[metric].values(), metric) ** 2 / 12
                )
                for metric, by_seed in values.items()
            }
        table[name] = {metric: Estimate(by_seed, intervals[metric]) for metric, by_seed in values.items()}

    rows, roundings, tests = [], [], []
    best = results.largest(metrics, "vote@", results.AT_BEST)
    compared_metrics = [*results.main_metrics(metrics), *([best] if best else [])]
    for arm, metric in product(runs.arms, compared_metrics):
        if baseline in (None, arm) or metric not in table[arm] or metric not in table[baseline]:
            continue
        ours, theirs = (
            {seed: one.evaluation for seed, one in sorted(policies[name].items()) if one.evaluation.has(metric)}
            for name in (arm, baseline)
        )
        both = [seed for seed in ours if seed in theirs]
        if both:
            by_seed = {seed: ours[seed].mean(metric) - theirs[seed].mean(metric) for seed in both}
            pooled = [np.sum([one[seed].metrics[metric] for seed in both], axis=0) for one in (ours, theirs)]
            paired, _ = results.paired_interval(metric, *pooled, **over_problems)
            rounding = _coarsest([one[seed] for one in (ours, theirs) for seed in both], metric) ** 2 / 6
            over_seeds = results.seeds_interval(metric, [*by_seed.values()], differences=True, rounding=rounding)
            rows.append((by_seed, paired if runs.is_one else over_seeds, arm, metric, paired))
            roundings.append(rounding)
            tests.append(mean_p_value([*by_seed.values()], rounding=rounding))
    p_values = np.array(tests)
    adjusted, tested = np.full(len(rows), math.nan), ~np.isnan(p_values)
    adjusted[tested] = holm(p_values[tested])
    level = LEVEL / max(int(tested.sum()), 1)
    differences = [
        Difference(*row, float(p), float(q), detectable([*row[0].values()], level=level, rounding=one))
        for row, p, q, one in zip(rows, p_values, adjusted, roundings, strict=True)
    ]

    again = [(one, Trained(one.record, one.record.summary["baseline"])) for one in runs.replicates.values()]
    gaps = {m: [a.evaluation.mean(m) - b.evaluation.mean(m) for a, b in again] for m in metrics}
    known = {m: [gap for gap in found if math.isfinite(gap)] for m, found in gaps.items()}  # NaN where one lacks it
    noise = {m: math.sqrt(sum(gap**2 for gap in found) / len(found)) for m, found in known.items() if found}
    return Comparison(
        runs=runs,
        arms=runs.arms,
        seeds=runs.seeds,
        is_one=runs.is_one,
        problems=len(evaluated[0].problems),
        temperature=evaluated[0].temperature,
        labels={name: runs.labels.get(name) or first.label(name) for name in compared},
        metrics=metrics,
        table=table,
        baseline=baseline,
        replicate=again[0][1].settings.label if again else None,
        noise=noise,
        differences=tuple(differences),
        from_start=_changes(runs, results.START),
        from_baseline=_changes(runs, baseline) if baseline in runs.arms else {},
        matched=_matched(runs, baseline),
    )


def _coarsest(evaluations: Iterable[Evaluation], metric: str) -> float:
    return max(one.grain(metric) for one in evaluations)


def _baseline(runs: RunSet, wanted: str | None) -> str | None:
    if wanted is not None:
        named = [arm for arm, label in runs.labels.items() if wanted in (arm, label)]
        if not named:
            raise UserError(f"--baseline: there is no arm {wanted!r}; the arms are {'; '.join(runs.labels.values())}")
        return named[0]
    if len(runs.arms) < 2:
        return results.START if results.START in runs.policies and runs.arms else None
    if runs.is_one:
        own, path = runs.records[0].summary["baseline"], runs.records[0].folder / "summary.json"
        if own is not None and own not in runs.arms:
            raise UserError(f"{path}: the baseline {own!r} is not an arm; the arms are {', '.join(runs.arms)}")
        return own
    plain = [arm for arm, by_seed in runs.arms.items() if next(iter(by_seed.values())).settings.label in PLAIN_LABELS]
    return (plain or list(runs.arms))[0]


def _changes(runs: RunSet, before: str) -> dict[str, dict[str, float]]:
    """The changes of every other arm since ``before``, where both were measured in some seed."""
    found, old = {}, runs.policies.get(before, {})
    for arm, by_seed in runs.arms.items():
        both = [seed for seed in by_seed if seed in old and arm != before]
        pairs = [(old[seed].evaluation, by_seed[seed].evaluation) for seed in both]
        counts = [results.newly_solved_and_lost(*pair) for pair in pairs if all(one.has(SOLVED_METRIC) for one in pair)]
        if counts:
            found[arm] = pd.DataFrame(counts).mean().to_dict()
    return found


def _matched(runs: RunSet, baseline: str | None) -> MatchedArms:
    accuracies: dict[int, float] = {}
    left_out: dict[str, dict[int, str]] = {}
    values, last = [], []
    for seed in runs.seeds:
        collections = {arm: found[seed].lines("collection") for arm, found in runs.arms.items() if seed in found}
        curves = {arm: lines[["accuracy", *MATCHED_MEASURES]].to_numpy(float) for arm, lines in collections.items()}
        matched = match_accuracy(curves, baseline)
        for arm, reason in matched.reasons.items():
            left_out.setdefault(arm, {})[seed] = reason
        if matched.accuracy is not None:
            accuracies[seed] = matched.accuracy
        values += [(arm, seed, *found) for arm, found in matched.values.items()]
        last += [(arm, seed, *curve[-1, 1:]) for arm, curve in curves.items() if len(curve) and len(curves) > 1]
    matched, at_end = (
        pd.DataFrame(rows, columns=["arm", "seed", *MATCHED_MEASURES]).set_index(["arm", "seed"])
        for rows in (values, last)
    )
    is_base = matched.index.get_level_values("arm") == baseline
    apart = matched[~is_base].sub(matched[is_base].droplevel("arm"), level="seed")
    cells: list[Cells] = []
    for table in (matched, apart, at_end):
        cells.append({measure: {} for measure in MATCHED_MEASURES})
        for measure, arm in product(MATCHED_MEASURES, runs.arms):
            by_seed = table[table.index.get_level_values("arm") == arm][measure].droplevel("arm").dropna().to_dict()
            if by_seed:
                interval = results.seeds_interval(measure, [*by_seed.values()], differences=table is apart)
                cells[-1][measure][arm] = Estimate(by_seed, interval)
    return MatchedArms(accuracies, cells[0], cells[1], cells[2], left_out)
