"""Arms at the same training accuracy: entropy and Distinct-4 where every arm had learned as much.

Arms learn at different speeds, and entropy falls as accuracy rises, so a difference at the end of training mixes what
an arm does with how far it came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_edo.report.run_record import RunRecord, number

MATCHED_MEASURES = ("entropy", "distinct_4")
MIN_GAIN = 0.02
"""Accuracy gained over the first collection below which an arm has not learned: the sampling noise of a collection."""
MIN_SHARE_OF_BEST_GAIN = 0.25
"""An arm that gained less than this share of the best arm's gain is left out of the matching: otherwise one arm that
failed would pull the common level down to the start, where all arms are alike and nothing is compared."""


@dataclass(frozen=True)
class CurvePoint:
    """One collection: the frozen policy's sampled accuracy on the training problems, and what else it measured."""

    accuracy: float
    measures: dict[str, float]


@dataclass(frozen=True)
class Matched:
    """Every arm of one seed, read at one sampled training accuracy."""

    accuracy: float | None
    values: dict[str, dict[str, float]]
    """measure -> arm -> value at that accuracy."""
    last: dict[str, dict[str, float]]
    """measure -> arm -> value at the arm's last collection, at whatever accuracy that had."""
    reasons: dict[str, str]
    """arm -> why it has no value at that accuracy."""


def curve(record: RunRecord, arm: str) -> list[CurvePoint]:
    """The arm's collections, in order."""
    return [
        CurvePoint(number(line.get("reward")), {m: number(line.get(m)) for m in MATCHED_MEASURES})
        for line in record.of("collection", arm)
    ]


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
