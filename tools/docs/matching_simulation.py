"""How often the comparison at matched accuracy finds a difference: where there is none, and where there is one.

    python tools/docs/matching_simulation.py              # a few minutes on one core
    python tools/docs/matching_simulation.py --studies 200

In a simulated study two arms learn at different speeds along one frontier of entropy against accuracy; a collection's
accuracy is that of 10 responses to each of 128 problems. Each seed is matched by ``report.matching``, and the
differences of a study's seeds are tested as a report tests them (Student's t, level .05). The table is Markdown.
"""

from __future__ import annotations

import argparse

import numpy as np
from report_tables import markdown

from nemo_edo.metrics import mean_p_value
from nemo_edo.report.matching import match_accuracy

RESPONSES = 128 * 10
FRONTIERS = {
    "flat": lambda accuracy: 0.33 - 0.4 * (accuracy - 0.3),
    "steep": lambda accuracy: 1.0 - 1.2 * (accuracy - 0.3),
    "curved": lambda accuracy: 0.9 * (1 - accuracy) ** 1.5,
    "quadratic": lambda accuracy: 0.2 + 3 * (0.8 - accuracy) ** 2,
    "hinge": lambda accuracy: 0.3 + 2 * np.maximum(0.55 - accuracy, 0),
    "late hinge": lambda accuracy: 0.9 - 2 * np.maximum(accuracy - 0.5, 0),
    "S-shaped": lambda accuracy: 0.3 + 0.6 / (1 + np.exp((accuracy - 0.55) / 0.03)),
}
ENTROPY_NOISE = 0.010
"""Nats, standard deviation of a collection's mean, mostly by the choice of its problems: as the studies' collections
have it."""


def simulated_curve(
    rng: np.random.Generator,
    frontier: str,
    speed: float,
    *,
    shift: float = 0.0,
    iterations: int = 30,
    gain: float = 0.5,
    noise: float = 0.0,
) -> np.ndarray:
    """[C, 2] accuracy and entropy of an arm that closes the gap to accuracy 0.3 + ``gain`` with the time constant
    ``speed`` (iterations). noise: of a collection's accuracy beyond that of its responses, as of the choice of its
    problems."""
    accuracy = 0.3 + gain * (1 - np.exp(-np.arange(iterations) / speed))
    entropy = FRONTIERS[frontier](accuracy) + shift + ENTROPY_NOISE * rng.standard_normal(iterations)
    found = rng.binomial(RESPONSES, accuracy) / RESPONSES + noise * rng.standard_normal(iterations)
    return np.column_stack([found, entropy])


def shown(
    rng: np.random.Generator,
    frontier: str,
    seeds: int,
    studies: int,
    *,
    speeds: tuple[float, float] = (5.0, 15.0),
    shift: float = 0.0,
    **settings,
) -> float:
    """The share of studies that find a difference between the two arms, the second shifted by ``shift`` nats; one
    that cannot compare them finds none."""
    found = 0
    for _ in range(studies):
        gaps = []
        for _ in range(seeds):
            first, second = (
                simulated_curve(rng, frontier, speed, shift=by, **settings)
                for speed, by in zip(speeds, (0.0, shift), strict=True)
            )
            values = match_accuracy({"first": first, "second": second}, "first").values
            if values:
                gaps.append(values["second"][0] - values["first"][0])
        found += len(gaps) > 1 and mean_p_value(gaps) < 0.05
    return found / studies


CASES = {
    "as above": {},
    "speeds 3 and 20": {"speeds": (3.0, 20.0)},
    "speeds 2.5 and 20": {"speeds": (2.5, 20.0)},
    "speeds 3 and 4": {"speeds": (3.0, 4.0)},
    "equal speeds": {"speeds": (8.0, 8.0)},
    "15 iterations, speeds 3 and 8": {"iterations": 15, "speeds": (3.0, 8.0)},
    "60 iterations": {"iterations": 60},
    "accuracy gains 0.2": {"gain": 0.2},
    "noisier collections": {"noise": 0.02},
}


def table(studies: int) -> str:
    rng = np.random.default_rng(0)
    heads = ["case", "frontier", "none, 5 seeds", "none, 10 seeds", "0.02 nats, 5 seeds"]
    rows = [
        [
            case,
            frontier,
            *(f"{shown(rng, frontier, seeds, studies, **settings):.3f}" for seeds in (5, 10)),
            f"{shown(rng, frontier, 5, studies, shift=0.02, **settings):.3f}",
        ]
        for case, settings in CASES.items()
        for frontier in FRONTIERS
    ]
    return markdown(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=500)
    print(table(parser.parse_args().studies))
