"""The arms of one run beside each other: intervals, paired differences, and entropy at matched accuracy.

Arms learn at different speeds, and entropy falls as accuracy rises, so a difference at the end of training mixes what
an arm does with how far it came. ``match_accuracy`` therefore also reads every arm where its accuracy was the same.

Dimensions: P test problems, the same ones in the same order for every arm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from nemo_edo.metrics.intervals import Interval, bootstrap_ratio, paired_bootstrap
from nemo_edo.metrics.paired import solved_and_lost

START = "warmup"
"""The name under which the policy that every arm starts from is evaluated."""
START_LABEL = "Start (before RL)"
ALONE_LABEL = "SFT"
"""Of the same policy in a run without arms, whose supervised training is all."""
UNTRAINED_LABEL = "Model as it is"
"""In a run that trains nothing."""
PLAIN_LABELS = ("GRPO", "ETO")
"""Arms without exploration or a rival to it: what the others are compared with."""
MATCHED_MEASURES = ("entropy", "distinct_4")
MIN_GAIN = 0.02
"""Accuracy gained over the first collection below which an arm has not learned: the sampling noise of a collection."""
MIN_SHARE_OF_BEST_GAIN = 0.25
"""An arm that gained less than this share of the best arm's gain is left out of the matching: else one arm that
failed would drag the common level down to the start, where all arms are alike and nothing is compared."""


@dataclass(frozen=True)
class ArmSettings:
    """What sets an arm apart, as the run's summary records it."""

    label: str
    alpha: float | None
    beta: float
    exploration_weight: float
    """alpha * beta, or the coefficient that replaces it."""
    log_ratio_floor: float | None
    entropy_coefficient: float
    iterations: int


@dataclass(frozen=True)
class Evaluation:
    """One arm's results on the test problems, kept for each problem so that arms can be paired."""

    arm: str
    problems: tuple[str, ...]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    """name -> (sums [P], counts [P]) float64; the metric is sum(sums) / sum(counts)."""

    def interval(self, metric: str, *, resamples: int, seed: int) -> Interval | None:
        """The metric with its 95 % bootstrap interval over problems; None if it was not measured on any problem."""
        if not self.has(metric):
            return None
        return bootstrap_ratio(*self.metrics[metric], resamples=resamples, seed=seed)

    def means(self, *, resamples: int, seed: int) -> dict[str, dict[str, float]]:
        """``interval`` as "mean", "low" and "high", of each metric that was measured on any problem."""
        intervals = {metric: self.interval(metric, resamples=resamples, seed=seed) for metric in self.metrics}
        return {metric: asdict(interval) for metric, interval in intervals.items() if interval is not None}

    def has(self, metric: str) -> bool:
        return metric in self.metrics and self.metrics[metric][1].sum() > 0


@dataclass(frozen=True)
class CurvePoint:
    """One collection: the frozen policy's sampled accuracy on the training problems, and what else it measured."""

    accuracy: float
    measures: dict[str, float]


@dataclass(frozen=True)
class Difference:
    """arm - baseline on the same problems, with its paired bootstrap interval."""

    arm: str
    metric: str
    interval: Interval

    @property
    def exceeds_interval(self) -> bool:
        """Whether the 95 % interval leaves zero out."""
        return self.interval.low > 0 or self.interval.high < 0


@dataclass(frozen=True)
class Matched:
    """Every arm read at one sampled training accuracy. ``reasons`` says, by arm, why an arm has no value."""

    accuracy: float | None
    values: dict[str, dict[str, float]]
    """measure -> arm -> value at that accuracy."""
    last: dict[str, dict[str, float]]
    """measure -> arm -> value at the arm's last collection, at whatever accuracy that had."""
    reasons: dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """Everything that the report says in numbers, one seed of each arm."""

    arms: dict[str, ArmSettings]
    """The trained arms, in the order of the run."""
    labels: dict[str, str]
    """Arm -> label of everything in the table: the start, where it was evaluated, and the trained arms."""
    metrics: tuple[str, ...]
    table: dict[str, dict[str, Interval | None]]
    """arm -> metric -> interval."""
    baseline: str | None
    differences: tuple[Difference, ...]
    matched: Matched
    problems: int
    seed: int

    def difference(self, arm: str, metric: str) -> Difference | None:
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)


def compare(
    evaluations: Mapping[str, Evaluation],
    curves: Mapping[str, Sequence[CurvePoint]],
    *,
    arms: Mapping[str, ArmSettings],
    baseline: str | None,
    seed: int,
    resamples: int,
    alone: str = ALONE_LABEL,
) -> Comparison:
    """Put the arms beside each other. alone: the label of a run's only policy, where it has no arms.

    Each trained arm is compared with the ``baseline`` arm; a run with one arm alone is compared with its own start
    (``START``), where that was evaluated. Raises ValueError if arms were evaluated on different problems.
    """
    shown = [arm for arm in (START, *arms) if arm in evaluations]
    if not set(arms) <= set(evaluations):
        raise ValueError(f"no evaluation of arm {min(set(arms) - set(evaluations))}")
    if baseline is not None and baseline not in arms:
        raise ValueError(f"the baseline {baseline!r} is not an arm; the arms are {', '.join(arms)}")
    _same_problems([evaluations[arm] for arm in shown])
    metrics = tuple(sorted({name for arm in shown for name in evaluations[arm].metrics}, key=metric_order))
    if len(arms) == 1:
        baseline = START if START in evaluations else None
    pairs = [
        (arm, metric)
        for arm in arms
        if baseline not in (None, arm)
        for metric in main_metrics(metrics)
        if evaluations[arm].has(metric) and evaluations[baseline].has(metric)
    ]
    differences = tuple(
        Difference(
            arm,
            metric,
            paired_bootstrap(
                *evaluations[arm].metrics[metric],
                *evaluations[baseline].metrics[metric],
                resamples=resamples,
                seed=seed,
            ),
        )
        for arm, metric in pairs
    )
    table = {
        arm: {metric: evaluations[arm].interval(metric, resamples=resamples, seed=seed) for metric in metrics}
        for arm in shown
    }
    labels = {START: START_LABEL if arms else alone} | {arm: settings.label for arm, settings in arms.items()}
    return Comparison(
        dict(arms),
        {arm: labels[arm] for arm in shown},
        metrics,
        table,
        baseline,
        differences,
        match_accuracy({arm: curves.get(arm, ()) for arm in arms}),
        len(evaluations[shown[0]].problems),
        seed,
    )


def _same_problems(evaluations: Sequence[Evaluation]) -> None:
    first = evaluations[0]
    for other in evaluations[1:]:
        if other.problems != first.problems:
            raise ValueError(
                f"arms {first.arm} and {other.arm} were evaluated on different problems, or in another "
                "order; differences are paired by problem, so evaluate both on the same file"
            )


def match_accuracy(curves: Mapping[str, Sequence[CurvePoint]]) -> Matched:
    """Read entropy and Distinct-4 of every arm at one sampled training accuracy.

    The rule: of each arm only its records count, the collections whose accuracy exceeds all before. An arm takes part
    if its records rise by at least ``MIN_GAIN`` and ``MIN_SHARE_OF_BEST_GAIN`` of the best arm's rise. The level is
    the lowest of the last records of those arms: the highest accuracy that all of them reached. Between the two
    records on either side of the level a measure is interpolated linearly in accuracy.
    """
    if len(curves) < 2:
        return Matched(None, {}, {}, {arm: "it is the only arm" for arm in curves})
    records = {arm: _records(points) for arm, points in curves.items()}
    gains = {arm: found[-1].accuracy - found[0].accuracy if found else 0.0 for arm, found in records.items()}
    needed = max(MIN_GAIN, MIN_SHARE_OF_BEST_GAIN * max(gains.values()))
    reasons = {
        arm: f"it never left the start: its training accuracy rose by {gain:.3f}, less than {needed:.3f}"
        if records[arm]
        else "it has no collection with an accuracy"
        for arm, gain in gains.items()
        if gain < needed
    }
    levels = [found[-1].accuracy for arm, found in records.items() if arm not in reasons]
    last = {
        measure: {arm: points[-1].measures.get(measure, math.nan) for arm, points in curves.items() if points}
        for measure in MATCHED_MEASURES
    }
    if len(levels) < 2:
        return Matched(
            None, {}, last, reasons | {arm: "no other arm to match it with" for arm in curves if arm not in reasons}
        )
    level = min(levels)
    reasons |= {
        arm: "its first collection is above the common accuracy"
        for arm, found in records.items()
        if arm not in reasons and found[0].accuracy > level
    }
    values = {
        measure: {arm: _at(records[arm], measure, level) for arm in curves if arm not in reasons}
        for measure in MATCHED_MEASURES
    }
    return Matched(level, values, last, reasons)


def _records(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points whose accuracy exceeds that of all before."""
    found: list[CurvePoint] = []
    for point in points:
        if math.isfinite(point.accuracy) and (not found or point.accuracy > found[-1].accuracy):
            found.append(point)
    return found


def _at(records: Sequence[CurvePoint], measure: str, accuracy: float) -> float:
    """Linear interpolation; NaN where a record on either side lacks the measure."""
    return float(
        np.interp(
            accuracy,
            [point.accuracy for point in records],
            [point.measures.get(measure, math.nan) for point in records],
        )
    )


def solved(evaluation: Evaluation) -> dict[str, bool]:
    """Of each problem by its id, whether the greedy response to it has the full reward."""
    sums_P, counts_P = evaluation.metrics["greedy_accuracy"]
    return dict(zip(evaluation.problems, ((counts_P > 0) & (sums_P >= counts_P)).tolist(), strict=True))


def newly_solved_and_lost(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Numbers of test problems, by the greedy response: wrong ``before`` and right ``after``, and the other way round.

    Raises ValueError where the two were evaluated on different problems.
    """
    changes = solved_and_lost(solved(before), solved(after))
    return {"newly_solved": float(len(changes.newly_solved)), "lost": float(len(changes.lost))}


_ORDER = (
    *("greedy_accuracy", "accuracy", "vote@", "pass@", "distinct_4", "distinct_answers", "answer_entropy"),
    *("entropy", "entropy_sampled", "well_formed", "response_length", "abstained"),
)
_NAMES = {
    "greedy_accuracy": "greedy accuracy",
    "accuracy": "sampled accuracy",
    "distinct_4": "Distinct-4",
    "distinct_4_corpus": "Distinct-4 (corpus)",
    "distinct_answers": "distinct answers",
    "answer_entropy": "answer entropy (nats)",
    "entropy": "entropy (nats)",
    "entropy_sampled": "entropy (nats), from samples",
    "abstained": "without a verdict",
    "judge_agreement": "judge and rules agree",
    "accuracy_by_judge": "accuracy by the judge, of these",
    "accuracy_by_rules": "accuracy by the rules, of these",
    "well_formed": "well-formed",
    "response_length": "length (tokens)",
}


def metric_name(metric: str) -> str:
    """The metric as a reader knows it."""
    return _NAMES.get(metric, metric)


def metric_order(metric: str) -> tuple[int, int, str]:
    """Sort key: the main metrics first, vote@N and pass@k by their number, then the rest by name."""
    family, number = re.fullmatch(r"(.*?)(?:(?<=@)(\d+))?", metric).groups()
    return _ORDER.index(family) if family in _ORDER else len(_ORDER), int(number or 0), metric


def largest(metrics: Sequence[str], family: str) -> str | None:
    """The metric of the family (``vote@`` or ``pass@``) with the largest number."""
    return max((metric for metric in metrics if metric.startswith(family)), key=metric_order, default=None)


def main_metrics(metrics: Sequence[str]) -> list[str]:
    """The metrics on which arms are compared: of vote@N and pass@k the largest only."""
    chosen = (
        "greedy_accuracy",
        "accuracy",
        largest(metrics, "vote@"),
        largest(metrics, "pass@"),
        "distinct_4",
        "entropy",
    )
    return [metric for metric in chosen if metric in metrics]
