"""How often the 95 % intervals over problems hold the truth, and how often paired tests reject without a difference.

    python tools/docs/coverage_table.py            # a few minutes on one core
    python tools/docs/coverage_table.py --sets 300

Sets of problems are simulated: each problem's chance of a right response is drawn from a beta distribution with the
rate as its mean, and from it ten responses in each of three rollouts. The tables are Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from report_tables import markdown

from nemo_edo.metrics import paired_difference
from nemo_edo.metrics.intervals import bootstrap_ratios, paired_bootstrap, share_intervals

PROBLEMS = (30, 256, 1319)
RATES = (1 / 30, 0.1, 0.5, 0.9)
SAMPLES, ROLLOUTS = 10, 3
SPREAD = 1.0
"""a + b of the beta distribution: problems differ from nearly always wrong to nearly always right."""
TOGETHER = 20
"""Sets whose intervals share their random numbers: their costs are shared too, and each still has its own coverage."""
RESAMPLES = 1000


def greedy(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.random(chances.shape) < chances).astype(float)


def sampled(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.binomial(SAMPLES * ROLLOUTS, chances) / (SAMPLES * ROLLOUTS)


def vote(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The wrong responses agree on one answer; a tie counts half."""
    right = rng.binomial(SAMPLES, chances[..., None], size=(*chances.shape, ROLLOUTS))
    return ((right > SAMPLES / 2) + 0.5 * (right == SAMPLES / 2)).mean(axis=-1)


def pass_at_4(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """1 - C(n - c, 4) / C(n, 4)."""
    total, wrong = SAMPLES * ROLLOUTS, SAMPLES * ROLLOUTS - rng.binomial(SAMPLES * ROLLOUTS, chances)
    return 1 - np.prod([np.maximum(wrong - i, 0) / (total - i) for i in range(4)], axis=0)


MEASURES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "greedy": greedy,
    "sampled": sampled,
    "vote@10": vote,
    "pass@4": pass_at_4,
}


def chances_of(rate: float, shape: tuple[int, ...], rng: np.random.Generator, spread: float = SPREAD) -> np.ndarray:
    return rng.beta(rate * spread, (1 - rate) * spread, shape)


def coverage(
    measure: str, problems: int, rate: float, sets: int, seed: int, *, old: bool = False, spread: float = SPREAD
) -> tuple[float, float]:
    """(share of intervals that hold the truth, their mean width). old: of the percentile bootstrap."""
    rng = np.random.default_rng([seed, problems, round(1e6 * rate)])
    truth = float(MEASURES[measure](chances_of(rate, (2_000_000,), rng, spread), rng).mean())
    held, width = 0, 0.0
    of = bootstrap_ratios if old else share_intervals
    for begin in range(0, sets, TOGETHER):
        values = MEASURES[measure](chances_of(rate, (TOGETHER, problems), rng, spread), rng)
        pairs = [(one, np.ones(problems)) for one in values]
        for interval in of(pairs, resamples=RESAMPLES, seed=seed + begin):
            held += interval.low <= truth <= interval.high
            width += interval.high - interval.low
    return held / sets, width / sets


TESTS = ("sign flips, p < .05", "interval without 0", "bootstrap interval without 0")


def rejections(
    measure: str, problems: int, rate: float, sets: int, seed: int, *, spread: float = SPREAD
) -> tuple[float, ...]:
    """How often each of ``TESTS`` finds a difference between two policies with the same chance on every problem."""
    rng = np.random.default_rng([seed, problems, round(1e6 * rate)])
    found, ones = np.zeros(len(TESTS)), np.ones(problems)
    for place in range(sets):
        chances = chances_of(rate, (problems,), rng, spread)
        a, b = (MEASURES[measure](chances, rng) for _ in range(2))
        ours, p = paired_difference(a, ones, b, ones, resamples=RESAMPLES, seed=place)
        old = paired_bootstrap(a, ones, b, ones, resamples=RESAMPLES, seed=place)
        found += [p < 0.05, not ours.low <= 0 <= ours.high, not old.low <= 0 <= old.high]
    return tuple(found / sets)


def tables(sets: int) -> list[str]:
    def cell(measure: str, problems: int, rate: float) -> str:
        (held, width), (held_before, _) = (coverage(measure, problems, rate, sets, 0, old=old) for old in (False, True))
        return f"{held:.3f} ({held_before:.3f}), {width:.3f}"

    heads = ["problems", "rate", *MEASURES]
    rows = [
        [str(problems), f"{rate:.3g}", *(cell(measure, problems, rate) for measure in MEASURES)]
        for problems in PROBLEMS
        for rate in RATES
    ]
    tested = [
        [measure, f"{rate:.3g}", *(f"{share:.3f}" for share in rejections(measure, PROBLEMS[0], rate, sets, 0))]
        for measure in ("greedy", "sampled")
        for rate in RATES
    ]
    return [markdown(heads, rows), markdown(["30 problems", "rate", *TESTS], tested)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=1000, help=f"simulated sets of problems, a multiple of {TOGETHER}")
    print("\n\n".join(tables(parser.parse_args().sets)))
