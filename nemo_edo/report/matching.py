"""Arms at the same training accuracy: entropy and Distinct-4 where every arm had learned as much.

Arms learn at different speeds, and entropy falls as accuracy rises, so a difference at the end of training mixes what
an arm does with how far it came.

Accuracies are noisy, and so a rule that picks collections by their accuracy, such as the running maximum or the first
above a level, reads the slower arm too early: it has more collections near the level, of which one is lucky. The curve
is fitted instead, by isotonic regression (Barlow et al. 1972): collections that fall below an earlier one are averaged
with it, their measures as their accuracies, whatever chance made of each. The reading is the mean over a range of
levels, away from both ends of the fits, where they follow the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_edo.report.run_record import RunRecord, number

MATCHED_MEASURES = ("entropy", "distinct_4")
LEVELS = (0.3, 0.8)
"""The range of levels, as shares of the way from the start to the highest accuracy that all arms reached. Chosen in
simulations (``tools/docs/matching_simulation.py``): closer to the end the highest collections are the lucky ones,
closer to the start arms are alike, and a narrower range reads fewer collections."""
NUM_LEVELS = 21
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
    """Every arm of one seed, read over one range of sampled training accuracies."""

    accuracy: float | None
    """The middle of the range."""
    values: dict[str, dict[str, float]]
    """measure -> arm -> its mean over the range."""
    last: dict[str, dict[str, float]]
    """measure -> arm -> value at the arm's last collection, at whatever accuracy that had."""
    reasons: dict[str, str]
    """arm -> why it has no value there."""


def curve(record: RunRecord, arm: str) -> list[CurvePoint]:
    """The arm's collections, in order."""
    return [
        CurvePoint(number(line.get("reward")), {m: number(line.get(m)) for m in MATCHED_MEASURES})
        for line in record.of("collection", arm)
    ]


def match_accuracy(curves: Mapping[str, Sequence[CurvePoint]]) -> Matched:
    """Read entropy and Distinct-4 of every arm over one range of sampled training accuracies.

    The rule: each arm's collections up to its best one are fitted by a curve whose accuracy never falls. An arm takes
    part if its fit rises by at least ``MIN_GAIN`` and ``MIN_SHARE_OF_BEST_GAIN`` of the best arm's rise. The range is
    ``LEVELS`` of the way from the highest of their fits' first accuracies to the lowest of their last. At each of
    ``NUM_LEVELS`` levels a measure is interpolated linearly in accuracy, and their mean is the value.
    """
    if len(curves) < 2:
        return Matched(None, {}, {}, {arm: "it is the only arm" for arm in curves})
    fits = {arm: _fitted(points) for arm, points in curves.items()}
    gains = {arm: fit[-1].accuracy - fit[0].accuracy if fit else 0.0 for arm, fit in fits.items()}
    needed = max(MIN_GAIN, MIN_SHARE_OF_BEST_GAIN * max(gains.values()))
    reasons = {
        arm: f"it never left the start: its training accuracy rose by {gain:.3f}, less than {needed:.3f}"
        if fits[arm]
        else "it has no collection with an accuracy"
        for arm, gain in gains.items()
        if gain < needed
    }
    last = {
        measure: {arm: points[-1].measures.get(measure, math.nan) for arm, points in curves.items() if points}
        for measure in MATCHED_MEASURES
    }
    top = min((fit[-1].accuracy for arm, fit in fits.items() if arm not in reasons), default=math.nan)
    reasons |= {
        arm: "its first collection is above the common accuracy"
        for arm, fit in fits.items()
        if arm not in reasons and fit[0].accuracy >= top
    }
    matched = [arm for arm in curves if arm not in reasons]
    if len(matched) < 2:
        return Matched(None, {}, last, reasons | {arm: "no other arm to match it with" for arm in matched})
    start = max(fits[arm][0].accuracy for arm in matched)
    levels = start + np.linspace(*LEVELS, NUM_LEVELS) * (top - start)
    values = {measure: {arm: _mean_over(fits[arm], measure, levels) for arm in matched} for measure in MATCHED_MEASURES}
    return Matched(float(levels.mean()), values, last, reasons)


def _fitted(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points up to the highest, those that fall pooled with the ones before until accuracies rise (the algorithm of
    pool adjacent violators): isotonic regression of accuracy on the collections' order, with means of the measures."""
    known = [point for point in points if math.isfinite(point.accuracy)]
    highest = max(range(len(known)), key=lambda place: known[place].accuracy, default=-1)
    blocks: list[list[CurvePoint]] = []
    for point in known[: highest + 1]:
        blocks.append([point])
        while len(blocks) > 1 and _accuracy(blocks[-2]) >= _accuracy(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [CurvePoint(_accuracy(block), _measures(block)) for block in blocks]


def _accuracy(block: Sequence[CurvePoint]) -> float:
    return math.fsum(point.accuracy for point in block) / len(block)


def _measures(block: Sequence[CurvePoint]) -> dict[str, float]:
    """NaN where one point lacks the measure."""
    return {
        measure: sum(point.measures.get(measure, math.nan) for point in block) / len(block)
        for measure in MATCHED_MEASURES
    }


def _mean_over(fit: Sequence[CurvePoint], measure: str, levels: np.ndarray) -> float:
    """NaN where a point on either side of a level lacks the measure."""
    accuracies = [point.accuracy for point in fit]
    return float(np.interp(levels, accuracies, [point.measures[measure] for point in fit]).mean())
