"""The charts over the number of responses k: votes, pass@k and best-of-k, each a curve for every arm."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from nemo_edo.evaluation.results import Evaluation, ratio_intervals
from nemo_edo.metrics.intervals import Interval
from nemo_edo.report.comparison import Comparison
from nemo_edo.report.plotting import Chart, Line, Styles, interval_line, line_chart, over_seeds
from nemo_edo.report.run_record import setting

SEEDS_BAND = " The line is the mean over seeds, the band reaches from the lowest to the highest seed."
PROBLEMS_BAND = " With 95 % bands over the test problems."
MOST_POINTS = 24
"""Most points of a curve over k: of more numbers of responses, large ones are left out first."""


def over_k_charts(comparison: Comparison, styles: Styles) -> list[Chart]:
    """The curves over the stored responses; without any, pass@k of the evaluations."""
    charts = _stored_charts(comparison, styles) or [_pass_chart(comparison, styles)]
    return [drawn for drawn in charts if drawn]


def _pass_chart(comparison: Comparison, styles: Styles) -> Chart | None:
    ks = [int(found[1]) for metric in comparison.metrics if (found := re.fullmatch(r"pass@(\d+)", metric))]
    lines = {}
    for arm in comparison.labels:
        cells = [comparison.cell(arm, f"pass@{k}") for k in ks]
        lines[arm] = interval_line(ks, [cell and Interval(cell.interval.mean, *cell.band) for cell in cells])
    caption = "Chance that at least one of k responses is correct (unbiased estimate)."
    caption += PROBLEMS_BAND if comparison.is_one else SEEDS_BAND
    return line_chart("pass", "pass@k", caption, lines, styles, x_title="responses (k)", y_title="pass@k")


def _stored_charts(comparison: Comparison, styles: Styles) -> list[Chart]:
    """Votes, pass@k and best-of-k by each score over the responses that ``evaluate --stored`` looked at, against k,
    with the tokens of k responses; empty where nothing is stored."""
    found = {
        arm: [one.test_time for one in comparison.runs.policies[arm].values() if one.test_time is not None]
        for arm in comparison.labels
    }
    evaluations = {arm: seeds for arm, seeds in found.items() if seeds}
    metrics = {metric for seeds in evaluations.values() for one in seeds for metric in one.metrics}
    scores = {metric.partition("/")[2] for metric in metrics if metric.startswith("best_of@")} - {"oracle"}
    families = {
        "majority@": ("Majority vote", "Expected score of the majority answer of k responses."),
        "pass@": ("pass@k", "Chance that at least one of k responses is right."),
        **{f"best_of@/{name}": (f"Best of k by {name}", f"The response of k that {name} scores highest.")
           for name in sorted(scores)},  # by the reward itself it is pass@k
    }  # fmt: skip
    bands = PROBLEMS_BAND if comparison.is_one else SEEDS_BAND
    axes = {"x_title": "responses to each problem (k)", "y_title": "share of test problems"}
    charts = []
    for family, (title, caption) in families.items():
        lines = {arm: _over_k(comparison, seeds, family) for arm, seeds in evaluations.items()}
        caption = f"{caption} Computed from the stored responses to the test problems.{bands}"
        charts.append(line_chart(re.sub(r"\W", "-", f"samples-{family}"), title, caption, lines, styles, **axes))
    return [drawn for drawn in charts if drawn]


def _over_k(comparison: Comparison, seeds: Sequence[Evaluation], family: str) -> Line:
    """The family's curve over k. family: the metrics' name without k."""
    before, _, after = family.partition("@")
    pattern = re.compile(rf"{re.escape(before)}@(\d+){re.escape(after)}")
    at_k = [
        {int(k[1]): metric for metric in one.metrics if (k := pattern.fullmatch(metric)) and one.has(metric)}
        for one in seeds
    ]
    kept = [{k: found[k] for k in thinned(sorted(found))} for found in at_k]
    if comparison.is_one:
        bootstrap = {
            "resamples": setting(comparison.runs.records[0], "evaluation.bootstrap"),
            "seed": comparison.seeds[0],
        }
        intervals = ratio_intervals({name: seeds[0].metrics[name] for name in kept[0].values()}, **bootstrap)
        line = interval_line(list(kept[0]), list(intervals.values()))
    else:
        means = [{k: one.mean(name) for k, name in found.items()} for one, found in zip(seeds, kept, strict=True)]
        line = over_seeds([pd.Series(one, dtype=float) for one in means])
    tokens = [sum(one.mean(f"tokens@{k}") for one in seeds) / len(seeds) for k in line.index]
    return line.assign(note=[f"{mean:.0f} tokens" if math.isfinite(mean) else "" for mean in tokens])


def thinned(ks: Sequence[int]) -> list[int]:
    """At most ``MOST_POINTS`` of the rising numbers, the first and the last among them, evenly spaced on a log scale
    where there are too many."""
    if len(ks) <= MOST_POINTS:
        return list(ks)
    wanted = np.geomspace(ks[0], ks[-1], MOST_POINTS)
    return sorted({min(ks, key=lambda k, target=target: abs(k - target)) for target in wanted})
