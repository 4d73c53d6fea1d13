"""More compute at test time: accuracy against the number of responses; pointing at one says how many tokens it took."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from nemo_edo.evaluation.results import Evaluation, ratio_intervals
from nemo_edo.report.plotting import ArmStyle, Chart, Point, Series, interval_series, line_chart, over_seeds

MOST_POINTS = 24
"""Most points of a curve: of more numbers of responses, large ones are left out first."""
STORED = "Computed from the stored responses to the test problems."
K_TITLE = "responses to each problem (k)"


def scaling_charts(
    stored: Mapping[str, Sequence[Evaluation]],
    styles: Mapping[str, ArmStyle],
    *,
    bands: str,
    resamples: int | None,
    seed: int,
) -> list[Chart]:
    """Votes, pass@k and best-of-k by each score, against k; empty where nothing is stored.

    stored: arm -> the evaluation of its ``test_time/ARM.json`` in each seed. resamples: of intervals over problems
    that gives one run its bands, which ``bands`` says in words; None: the bands are over seeds.
    """
    charts = []
    for family, name, caption in families(one for seeds in stored.values() for one in seeds):
        by_k = {
            arm: _over_problems(seeds[0], family, resamples, seed)
            if resamples is not None
            else over_seeds([_points(one, family) for one in seeds])
            for arm, seeds in stored.items()
        }
        by_k = {arm: replace(found, notes=_tokens(stored[arm], found.x)) for arm, found in by_k.items()}
        key, caption = re.sub(r"\W", "-", family), f"{caption} {STORED}{bands}"
        axes = {"x_title": K_TITLE, "y_title": "share of test problems"}
        charts.append(line_chart(f"samples-{key}", name, caption, by_k, styles, **axes))
    return [chart for chart in charts if chart]


def _over_problems(evaluation: Evaluation, family: str, resamples: int, seed: int) -> Series:
    ks = numbers_of_responses(evaluation, family)
    pairs = {metric: evaluation.metrics[metric] for metric in (metric_at(family, k) for k in ks)}
    return interval_series(ks, [*ratio_intervals(pairs, resamples=resamples, seed=seed).values()])


def _points(evaluation: Evaluation, family: str) -> list[Point]:
    return [(k, evaluation.mean(metric_at(family, k))) for k in numbers_of_responses(evaluation, family)]


def _tokens(seeds: Sequence[Evaluation], ks: Sequence[float]) -> list[str]:
    """Mean tokens of k responses, averaged over seeds."""
    means = [sum(one.mean(f"tokens@{int(k)}") for one in seeds) / len(seeds) for k in ks]
    return [f"{mean:.0f} tokens" if math.isfinite(mean) else "" for mean in means]


def families(evaluations: Iterable[Evaluation]) -> Iterator[tuple[str, str, str]]:
    """Families of curves over k: their metrics' name without k, a title, and what they are. Best-of-k by the reward
    itself is
    pass@k, which is there already."""
    yield "majority@", "Majority vote", "Expected score of the majority answer of k responses."
    yield "pass@", "pass@k", "Chance that at least one of k responses is right."
    metrics = {metric for found in evaluations for metric in found.metrics if metric.startswith("best_of@")}
    for name in sorted({metric.partition("/")[2] for metric in metrics} - {"oracle"}):
        yield f"best_of@/{name}", f"Best of k by {name}", f"The response of k that {name} scores highest."


def metric_at(family: str, k: int) -> str:
    """The metric's name at k: best_of@8/NAME."""
    before, _, after = family.partition("@")
    return f"{before}@{k}{after}"


def numbers_of_responses(evaluation: Evaluation, family: str) -> list[int]:
    """The k at which the family was measured, thinned."""
    before, _, after = family.partition("@")
    pattern = re.compile(rf"{re.escape(before)}@(\d+){re.escape(after)}")
    found = [
        match[1] for metric in evaluation.metrics if (match := pattern.fullmatch(metric)) and evaluation.has(metric)
    ]
    return thinned(sorted(map(int, found)))


def thinned(ks: Sequence[int]) -> list[int]:
    """At most ``MOST_POINTS`` of the rising numbers, the first and the last among them, evenly spaced on a log scale
    where there are too many."""
    if len(ks) <= MOST_POINTS:
        return list(ks)
    ratio = (ks[-1] / ks[0]) ** (1 / (MOST_POINTS - 1))
    wanted = [ks[0] * ratio**place for place in range(MOST_POINTS)]
    return sorted({min(ks, key=lambda k, target=target: abs(k - target)) for target in wanted})
