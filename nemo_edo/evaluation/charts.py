"""The charts of one run's report. One with nothing to draw is left out, and the report names it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import plotly.graph_objects as go

from nemo_edo.evaluation.alpha_charts import alpha_charts, alpha_points
from nemo_edo.evaluation.comparison import START, START_LABEL, Comparison, largest, metric_name, metric_order
from nemo_edo.evaluation.drawing import (
    ArmStyle,
    Chart,
    Series,
    arm_styles,
    bar_chart,
    interval_series,
    line_chart,
)
from nemo_edo.evaluation.run_record import RunRecord, number, setting
from nemo_edo.evaluation.scaling_charts import scaling_charts
from nemo_edo.evaluation.test_time_record import read_test_time
from nemo_edo.metrics.intervals import Interval

Styles = Mapping[str, ArmStyle]
Draw = Callable[[RunRecord, Comparison, Styles], Chart | None]


@dataclass(frozen=True)
class Lines:
    """A line for each arm, of a value that lines of metrics.jsonl of one kind have."""

    key: str
    title: str
    caption: str
    kind: str
    x: str
    y: str
    y_title: str

    def __call__(self, record: RunRecord, comparison: Comparison, styles: Styles) -> Chart | None:
        arms = [START] if self.kind == "sft_step" else list(record.arms)
        series = {arm: _column(record, self.kind, arm, self.x, self.y) for arm in arms}
        x_title = "optimizer step" if self.x == "step" else "iteration"
        return line_chart(self.key, self.title, self.caption, series, styles, x_title=x_title, y_title=self.y_title)


def all_charts(record: RunRecord, comparison: Comparison) -> tuple[list[Chart], list[str]]:
    """The charts that have something to draw, and the titles of those that have not. Charts of what only some runs
    have, responses stored for more compute at test time or several alphas, are not missed."""
    styles = arm_styles({START: START_LABEL} | comparison.labels)
    found = {title: draw(record, comparison, styles) for title, draw in _CHARTS.items()}
    charts = [chart for chart in found.values() if chart]
    charts += scaling_charts(
        read_test_time(record), styles, resamples=setting(record, "evaluation.bootstrap"), seed=comparison.seed
    )
    charts += alpha_charts(alpha_points(comparison.arms, comparison.table), comparison.metrics)
    return charts, [title for title, chart in found.items() if not chart]


def _column(record: RunRecord, kind: str, arm: str, x: str, y: str) -> Series:
    found = record.of(kind, arm)
    return Series([number(line.get(x)) for line in found], [number(line.get(y)) for line in found])


def _matched_chart(record: RunRecord, comparison: Comparison, styles: Styles) -> Chart | None:
    matched = comparison.matched
    series = {arm: _column(record, "collection", arm, "reward", "entropy") for arm in record.arms}
    caption = (
        "Each mark is one collection on the training problems; the policy moves right as it learns. Compare "
        "arms where their accuracy is the same."
    )
    if matched.accuracy is not None:
        caption += (
            f" The dashed line is the matched accuracy {matched.accuracy:.3f}, large marks are the "
            "interpolated values there."
        )
    marks = [
        go.Scatter(
            x=[matched.accuracy],
            y=[value],
            mode="markers",
            name=html.escape(styles[arm].label),
            marker={
                "symbol": styles[arm].symbol,
                "size": 13,
                "color": styles[arm].color,
                "line": {"width": 1.5, "color": "white"},
            },
            hovertemplate="matched: %{y:.4g}",
        )
        for arm, value in matched.values.get("entropy", {}).items()
        if math.isfinite(value)
    ]
    return line_chart(
        "matched",
        "Entropy against accuracy",
        caption,
        series,
        styles,
        marks=marks,
        level=matched.accuracy,
        x_title="sampled training accuracy",
        y_title="entropy (nats)",
    )


def _accuracy_bars(record: RunRecord, comparison: Comparison, styles: Styles) -> Chart | None:
    metrics = [m for m in ("greedy_accuracy", largest(comparison.metrics, "vote@")) if m in comparison.metrics]
    return bar_chart(
        "accuracy",
        "Test accuracy, greedy and voted",
        "Bars stand in the order of the legend, with 95 % intervals over the test problems.",
        _named_cells(comparison, metrics),
        styles,
        y_title="share of test problems",
    )


def _distinct_bars(record: RunRecord, comparison: Comparison, styles: Styles) -> Chart | None:
    return bar_chart(
        "distinct-bars",
        "Distinct-4 on the test problems",
        "Share of distinct 4-grams among a problem's responses, with 95 % intervals over the test problems. Read it "
        "beside the accuracy: a policy that has broken down is diverse, too.",
        _named_cells(comparison, ["distinct_4"]),
        styles,
        y_title="Distinct-4",
    )


def _named_cells(comparison: Comparison, metrics: list[str]) -> dict[str, dict[str, Interval]]:
    """arm -> the metric's name -> its interval, of those that were measured."""
    return {
        arm: {metric_name(metric): row[metric] for metric in metrics if row.get(metric) is not None}
        for arm, row in comparison.table.items()
    }


def _pass_chart(record: RunRecord, comparison: Comparison, styles: Styles) -> Chart | None:
    metrics = sorted((m for m in comparison.metrics if m.startswith("pass@")), key=metric_order)
    series = {
        arm: interval_series([metric_order(m)[1] for m in metrics], [row[m] for m in metrics])
        for arm, row in comparison.table.items()
    }
    return line_chart(
        "pass",
        "pass@k",
        "Chance that at least one of k responses is correct (unbiased estimate), with "
        "95 % bands over the test problems.",
        series,
        styles,
        x_title="k",
        y_title="pass@k",
    )


def _interim_chart(record: RunRecord, comparison: Comparison, styles: Styles) -> Chart | None:
    """Short evaluations during training; None without any, since the final ones have their own chart."""
    if all(line["kind"] != "evaluation" or line.get("final") for line in record.lines):
        return None
    series = {}
    for arm in record.arms:
        cells = [(line["iteration"], line["metrics"].get("greedy_accuracy")) for line in record.of("evaluation", arm)]
        known = [
            (x, Interval(*(number(cell.get(key)) for key in ("mean", "low", "high")))) for x, cell in cells if cell
        ]
        series[arm] = interval_series([x for x, _ in known], [cell for _, cell in known])
    return line_chart(
        "interim",
        "Test accuracy during training",
        "Greedy accuracy on the test problems, with 95 % bands.",
        series,
        styles,
        x_title="iteration",
        y_title="greedy accuracy",
    )


_TRAIN = "Training problems, sampled at temperature 1 from the policy at the start of each iteration."
_ROWS = (
    ("Entropy against accuracy", _matched_chart),
    Lines(
        "entropy",
        "Entropy over training",
        "Mean over sampled response tokens of the policy's entropy, at each optimizer step.",
        *("train_step", "step", "entropy", "entropy (nats)"),
    ),
    ("Test accuracy, greedy and voted", _accuracy_bars),
    ("pass@k", _pass_chart),
    ("Distinct-4 on the test problems", _distinct_bars),
    Lines("reward", "Reward over iterations", _TRAIN, "collection", "iteration", "reward", "mean reward"),
    Lines(
        "distinct",
        "Distinct-4 over iterations",
        f"Share of distinct 4-grams among a problem's responses. {_TRAIN}",
        *("collection", "iteration", "distinct_4", "Distinct-4"),
    ),
    Lines("kl", "KL to the reference policy", _TRAIN, "collection", "iteration", "kl", "KL (nats)"),
    Lines(
        "well-formed",
        "Well-formed answers",
        f"Share of responses that end by themselves with one final answer. {_TRAIN}",
        *("collection", "iteration", "well_formed", "share"),
    ),
    ("Test accuracy during training", _interim_chart),
    Lines(
        "exploration",
        "Exploration term",
        "Mean of log pi_theta - log pi_old on samples of pi_old, before its "
        "weight: zero at an iteration's first step, negative once the policy has moved away.",
        *("train_step", "step", "exploration", "value (nats)"),
    ),
    Lines(
        "floor",
        "Floored tokens",
        "Share of response tokens whose log-ratio lies at the floor, where the exploration term has no gradient.",
        *("train_step", "step", "floor_fraction", "share of tokens"),
    ),
    Lines(
        "warm-up",
        "Warm-up loss",
        "Supervised loss of the start that all arms share.",
        *("sft_step", "step", "loss", "loss (nats a token)"),
    ),
)
_CHARTS: dict[str, Draw] = dict((row.title, row) if isinstance(row, Lines) else row for row in _ROWS)
"""By title, in the order of the page."""
