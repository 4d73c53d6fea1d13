"""Arms at the same training accuracy: entropy and Distinct-4 where every arm had learned as much.

Arms learn at different speeds, and entropy falls as accuracy rises, so a difference at the end of training mixes what
an arm does with how far it came.

Accuracies are noisy, and so a rule that picks collections by their accuracy, such as the running maximum or the first
above a level, reads the slower arm too early: it has more collections near the level, of which one is lucky. The curve
is fitted instead, by isotonic regression (Barlow et al. 1972): collections that fall below an earlier one are averaged
with it, their measures as their accuracies, whatever chance made of each. The reading is the mean over a range of
levels, away from both ends of the fits, where they follow the noise.

Dimensions: C collections of an arm, M measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

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
class Matched:
    """Every arm of one seed, read over one range of sampled training accuracies."""

    accuracy: float | None
    """The middle of the range."""
    values: dict[str, np.ndarray]
    """arm -> [M] the mean of each measure over the range."""
    reasons: dict[str, str]
    """arm -> why it has no value there."""


def match_accuracy(curves: Mapping[str, np.ndarray]) -> Matched:
    """Read the measures of every arm over one range of sampled training accuracies.

    curves: arm -> [C, 1 + M], of each collection, in order, the frozen policy's sampled accuracy on the training
    problems and the measures; NaN where a value is missing.

    The rule: each arm's collections up to its best one are fitted by a curve whose accuracy never falls. An arm takes
    part if its fit rises by at least ``MIN_GAIN`` and ``MIN_SHARE_OF_BEST_GAIN`` of the best arm's rise. The range is
    ``LEVELS`` of the way from the highest of their fits' first accuracies to the lowest of their last. At each of
    ``NUM_LEVELS`` levels a measure is interpolated linearly in accuracy, and their mean is the value.
    """
    if len(curves) < 2:
        return Matched(None, {}, {arm: "it is the only arm" for arm in curves})
    fits = {arm: _fitted(curve) for arm, curve in curves.items()}
    rises = {arm: fit[-1, 0] - fit[0, 0] if len(fit) else 0.0 for arm, fit in fits.items()}
    needed = max(MIN_GAIN, MIN_SHARE_OF_BEST_GAIN * max(rises.values()))
    reasons = {
        arm: f"it never left the start: its training accuracy rose by {rise:.3f}, less than {needed:.3f}"
        if len(fits[arm])
        else "it has no collection with an accuracy"
        for arm, rise in rises.items()
        if rise < needed
    }
    learned = {arm: fit for arm, fit in fits.items() if arm not in reasons}
    top = min((fit[-1, 0] for fit in learned.values()), default=np.nan)
    reasons |= {
        arm: "its first collection is above the common accuracy" for arm, fit in learned.items() if fit[0, 0] >= top
    }
    matched = {arm: fit for arm, fit in learned.items() if arm not in reasons}
    if len(matched) < 2:
        return Matched(None, {}, reasons | {arm: "no other arm to match it with" for arm in matched})
    start = max(fit[0, 0] for fit in matched.values())
    levels = start + np.linspace(*LEVELS, NUM_LEVELS) * (top - start)
    values = {
        arm: np.array([np.interp(levels, fit[:, 0], measure).mean() for measure in fit[:, 1:].T])
        for arm, fit in matched.items()
    }
    return Matched(float(levels.mean()), values, reasons)


def _fitted(curve: np.ndarray) -> np.ndarray:
    """The collections up to the highest, pooled where accuracy falls or stays, with means of the measures: NaN where
    one lacks the measure."""
    known = curve[np.isfinite(curve[:, 0])]
    if not len(known):
        return known
    risen = known[: np.argmax(known[:, 0]) + 1]
    accuracies, block = np.unique(isotonic_regression(risen[:, 0]).x, return_inverse=True)
    sums = [np.bincount(block, weights=measure) for measure in risen[:, 1:].T]
    return np.column_stack([accuracies, *(total / np.bincount(block) for total in sums)])
