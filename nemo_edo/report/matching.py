"""Arms at the same training accuracy: entropy and Distinct-4 where every arm had learned as much.

Arms learn at different speeds, and entropy falls as accuracy rises, so a difference at the end of training mixes what
an arm does with how far it came.

Accuracies are noisy, and so a rule that picks collections by their accuracy, such as the running maximum or the first
above a level, reads the slower arm too early: it has more collections near the level, of which one is lucky. The curve
is fitted instead, by isotonic regression (Barlow et al. 1972): collections that fall below an earlier one are averaged
with it, their measures as their accuracies, whatever chance made of each.

Entropy bends over accuracy, and a fast arm has few collections on the way, whose chord is above or below the bend. So
two arms are compared at each other's collections, where one of them is measured and the other interpolated: the more
at those of the arm whose own are further apart, and the less at one that is far from the other arm's.

Dimensions: C collections of an arm, M measures, K points of a fit between its first and its last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

MATCHED_MEASURES = ("entropy", "distinct_4")
LEVELS = (0.3, 0.8)
"""The range of accuracies, as shares of the way from the start to the highest that all arms reached. Chosen in
simulations (``tools/docs/matching_simulation.py``): closer to the end the highest collections are the lucky ones,
closer to the start arms are alike, and a narrower range reads fewer collections."""
MIN_GAIN = 0.02
"""Accuracy gained over the first collection below which an arm has not learned: the sampling noise of a collection."""
NEAR = 0.02
"""Accuracy by which a collection may be away from the other arm's: at this distance it counts half."""
MIN_SHARE_OF_BEST_GAIN = 0.25
"""An arm that gained less than this share of the best arm's gain is left out of the matching: otherwise one arm that
failed would pull the common level down to the start, where all arms are alike and nothing is compared."""


@dataclass(frozen=True)
class Matched:
    accuracy: float | None
    values: dict[str, np.ndarray]
    """arm -> [M] the mean of each measure over the range."""
    reasons: dict[str, str]


@dataclass(frozen=True)
class _Fit:
    points: np.ndarray
    """[F, 1 + M] rising accuracies and the measures."""
    sizes: np.ndarray
    """[F] the collections that each is the mean of."""

    @property
    def rise(self) -> float:
        return self.points[-1, 0] - self.points[0, 0] if len(self.points) else 0.0

    def at(self, accuracies: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(accuracies, self.points[:, 0], one) for one in self.points[:, 1:].T], axis=1)


def match_accuracy(curves: Mapping[str, np.ndarray], baseline: str | None = None) -> Matched:
    """Read the measures of every arm over one range of sampled training accuracies.

    curves: arm -> [C, 1 + M], of each collection, in order, the frozen policy's sampled accuracy on the training
    problems and the measures; NaN where a value is missing. baseline: the arm that the others are compared with; None,
    or where it has no value: the first that has one.

    The rule: each arm's collections up to its best one are fitted by a curve whose accuracy never falls. An arm takes
    part if its fit rises by at least ``MIN_GAIN`` and ``MIN_SHARE_OF_BEST_GAIN`` of the best arm's rise. The range is
    ``LEVELS`` of the way from the highest of their fits' first accuracies to the lowest of their last. The baseline's
    values are its fit's means over the range, another arm's are these plus its difference (``_difference``), which
    needs collections in the range: where they are too far apart, arms cannot be compared.
    """
    if len(curves) < 2:
        return Matched(None, {}, dict.fromkeys(curves, "it is the only arm"))
    fits = {arm: _fitted(curve) for arm, curve in curves.items()}
    needed = max(MIN_GAIN, MIN_SHARE_OF_BEST_GAIN * max(fit.rise for fit in fits.values()))
    reasons = {
        arm: f"it never left the start: its training accuracy rose by {fit.rise:.3f}, less than {needed:.3f}"
        if len(fit.points)
        else "it has no collection with an accuracy"
        for arm, fit in fits.items()
        if fit.rise < needed
    }
    learned = {arm: fit for arm, fit in fits.items() if arm not in reasons}
    top = min((fit.points[-1, 0] for fit in learned.values()), default=np.nan)
    reasons |= {
        arm: "its first collection is above the common accuracy"
        for arm, fit in learned.items()
        if fit.points[0, 0] >= top
    }
    matched = {arm: fit for arm, fit in learned.items() if arm not in reasons}
    if len(matched) < 2:
        return Matched(None, {}, reasons | dict.fromkeys(matched, "no other arm to match it with"))
    start = max(fit.points[0, 0] for fit in matched.values())
    low, high = (start + share * (top - start) for share in LEVELS)
    first = baseline if baseline in matched else next(iter(matched))
    own = matched[first].at(np.linspace(low, high, 21)).mean(axis=0)
    values = {}
    for arm, fit in matched.items():
        apart = np.zeros_like(own) if arm == first else _difference(fit, matched[first], low, high)
        if apart is None:
            reasons[arm] = "it cannot be compared: its collections, or the baseline's, are too far apart"
        else:
            values[arm] = own + apart
    return Matched(float((low + high) / 2), values, reasons) if len(values) > 1 else Matched(None, {}, reasons)


def _difference(arm: _Fit, baseline: _Fit, low: float, high: float) -> np.ndarray | None:
    """[M] the arm's measures minus the baseline's between two accuracies; None without a collection there.

    A chord over a distance g errs by a multiple of g^2 where the curve bends, above the arm's points as much as below
    the baseline's. Weighted by the other's squared distances, the two errors of a quadratic curve cancel.
    """
    sides = []
    for ours, theirs, sign in ((arm, baseline, 1), (baseline, arm, -1)):
        accuracies, known = ours.points[:, 0], theirs.points[:, 0]
        inner = slice(1, len(accuracies) - 1)  # the last point is the luckiest
        at_K, between_K = accuracies[inner], (accuracies[:-2] + accuracies[2:]) / 2
        # Whether a point is in the range is asked of its accuracy, and of the mean of its neighbours': the first alone
        # would take points at the range's ends for their luck, the second alone for their neighbours'.
        inside_K = sum(((one >= low) & (one <= high)).astype(float) / 2 for one in (at_K, between_K))
        after = np.clip(np.searchsorted(known, at_K), 1, len(known) - 1)
        before_K, after_K = at_K - known[after - 1], known[after] - at_K
        far_K = before_K * after_K / (before_K + after_K)
        reached_K = (at_K >= known[0]) & (at_K <= known[-1])
        weights_K = inside_K * reached_K * ours.sizes[inner] / (1 + (far_K / NEAR) ** 2)
        counts = weights_K > 0
        if counts.any():
            gaps_KM = (ours.points[inner, 1:] - theirs.at(at_K))[counts]
            distances = np.diff(accuracies)[(accuracies[1:] > low) & (accuracies[:-1] < high)]
            squared = (distances**3).sum() / distances.sum()  # their mean over the range
            sides.append((squared, sign * (weights_K[counts] @ gaps_KM) / weights_K[counts].sum()))
    total = sum(weight for weight, _ in sides)
    return sum(weight * gap / total for weight, gap in sides) if sides else None


def _fitted(curve: np.ndarray) -> _Fit:
    """The collections up to the highest, pooled where accuracy falls or stays, with means of the measures: NaN where
    one lacks the measure."""
    known = curve[np.isfinite(curve[:, 0])]
    if not len(known):
        return _Fit(known, np.zeros(0))
    risen = known[: np.argmax(known[:, 0]) + 1]
    accuracies, block = np.unique(isotonic_regression(risen[:, 0]).x, return_inverse=True)
    sizes = np.bincount(block)
    sums = [np.bincount(block, weights=measure) for measure in risen[:, 1:].T]
    return _Fit(np.column_stack([accuracies, *(total / sizes for total in sums)]), sizes)
