"""More compute at test time: accuracy against the number of responses, and against the tokens spent on them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.evaluation.drawing import ArmStyle, Chart, Series, interval_series, line_chart
from nemo_edo.metrics.intervals import bootstrap_ratios

MOST_POINTS = 24
"""Of a curve: beyond, numbers of responses are left out, the more the larger they are."""
STORED = "Computed from the stored responses to the test problems, with 95 % bands over the problems."
K_TITLE, TOKENS_TITLE = "responses to each problem (k)", "mean tokens of k responses"


def scaling_charts(
    evaluations: Mapping[str, Evaluation], styles: Mapping[str, ArmStyle], *, resamples: int, seed: int
) -> list[Chart]:
    """Of the arms whose ``test_time/ARM.json`` there is: votes, pass@k and best-of-k by each score, against k and
    against tokens. Empty where there is none."""
    charts = []
    for family, name, caption in families(evaluations.values()):
        by_k, by_tokens = {}, {}
        for arm, evaluation in evaluations.items():
            ks = numbers_of_responses(evaluation, family)
            pairs = [evaluation.metrics[metric_at(family, k)] for k in ks]
            cells = bootstrap_ratios(pairs, resamples=resamples, seed=seed)
            by_k[arm] = interval_series(ks, cells)
            by_tokens[arm] = interval_series([mean_tokens(evaluation, k) for k in ks], cells)
        charts += both_charts(family, name, f"{caption} {STORED}", by_k, by_tokens, styles)
    return charts


def both_charts(
    family: str,
    name: str,
    caption: str,
    by_k: Mapping[str, Series],
    by_tokens: Mapping[str, Series],
    styles: Mapping[str, ArmStyle],
) -> list[Chart]:
    """A family's curves against k and against tokens, without those that have nothing to draw."""
    key = re.sub(r"\W", "-", family)
    y = {"y_title": "share of test problems"}
    charts = [
        line_chart(f"samples-{key}", f"{name} against samples", caption, by_k, styles, x_title=K_TITLE, **y),
        line_chart(f"tokens-{key}", f"{name} against tokens", caption, by_tokens, styles, x_title=TOKENS_TITLE, **y),
    ]
    return [chart for chart in charts if chart]


def families(evaluations: Iterable[Evaluation]) -> Iterator[tuple[str, str, str]]:
    """Of curves over k: their metrics' name without k, a title, and what they are. Best-of-k by the reward itself is
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


def mean_tokens(evaluation: Evaluation, k: int) -> float:
    """That k responses take; NaN where it was not measured."""
    metric = f"tokens@{k}"
    if not evaluation.has(metric):
        return math.nan
    sums_P, counts_P = evaluation.metrics[metric]
    return float(sums_P.sum() / counts_P.sum())
