"""The report's charts: plotly figures as fragments of HTML, one style for each arm throughout.

A value that is missing or not finite leaves a gap; it is never drawn as zero. A chart with nothing to draw is left
out, and the report names it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from nemo_edo.evaluation.comparison import START, START_LABEL, Comparison, largest, metric_name, metric_order
from nemo_edo.evaluation.run_record import RunRecord, number
from nemo_edo.metrics.intervals import Interval

# Okabe and Ito's palette, told apart by colour-blind readers; those with most contrast first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
START_COLOR = "#7A7F87"
DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}
"""plotly's name -> SVG's dash array, for the legend. Five dashes and six colours repeat only after 30 arms."""
SYMBOLS = {
    "circle": "M13 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "square": "M13.5 2.5h7v7h-7z",
    "diamond": "M17 1l5 5-5 5-5-5z",
    "triangle-up": "M17 1.5l4.5 8h-9z",
    "cross": "M15.5 2h3v2.5H21v3h-2.5V10h-3V7.5H13v-3h2.5z",
}
"""plotly's name -> an SVG path in a box of 34 x 12, for the legend."""
MOST_MARKERS = 40
"""Longer lines are drawn without markers."""
FONT = {"family": "system-ui, sans-serif", "size": 12}


@dataclass(frozen=True)
class ArmStyle:
    label: str
    color: str
    dash: str
    symbol: str

    @property
    def dash_array(self) -> str:
        return DASHES[self.dash]

    @property
    def symbol_path(self) -> str:
        return SYMBOLS[self.symbol]

    def faded(self, alpha: float) -> str:
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    caption: str
    legend: tuple[ArmStyle, ...]
    """The arms drawn, in order."""
    html: str


@dataclass(frozen=True)
class Series:
    """One arm's line; x and y of equal length, NaN where there is no value."""

    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Lower and upper bounds of y."""

    @property
    def empty(self) -> bool:
        return not any(math.isfinite(a) and math.isfinite(b) for a, b in zip(self.x, self.y, strict=True))


def arm_styles(labels: Mapping[str, str]) -> dict[str, ArmStyle]:
    """A colour, dash and symbol for each arm; grey dots for the start."""
    dashes, symbols = list(DASHES), list(SYMBOLS)
    styles = {START: ArmStyle(labels[START], START_COLOR, "dot", "circle")} if START in labels else {}
    for index, arm in enumerate(arm for arm in labels if arm != START):
        styles[arm] = ArmStyle(
            labels[arm], COLORS[index % len(COLORS)], dashes[index % len(dashes)], symbols[index % len(symbols)]
        )
    return styles


def all_charts(record: RunRecord, comparison: Comparison) -> tuple[list[Chart], list[str]]:
    """The charts that have something to draw, and the titles of those that have not."""
    styles = arm_styles({START: START_LABEL} | comparison.labels)
    found = {title: chart for title, chart in _charts(record, comparison, styles)}
    return [chart for chart in found.values() if chart], [title for title, chart in found.items() if not chart]


def _charts(
    record: RunRecord, comparison: Comparison, styles: Mapping[str, ArmStyle]
) -> Iterable[tuple[str, Chart | None]]:
    def lines(
        key: str,
        title: str,
        caption: str,
        kind: str,
        x: str,
        y: str,
        y_title: str,
        arms: Iterable[str] = tuple(record.arms),
    ) -> tuple[str, Chart | None]:
        series = {arm: _column(record, kind, arm, x, y) for arm in arms}
        x_title = "optimizer step" if x == "step" else "iteration"
        return title, line_chart(key, title, caption, series, styles, x_title=x_title, y_title=y_title)

    train = "Training problems, sampled at temperature 1 from the policy at the start of each iteration."
    yield "Entropy against accuracy", _matched_chart(record, comparison, styles)
    yield lines(
        "entropy",
        "Entropy over training",
        "Mean over sampled response tokens of the policy's entropy, at each optimizer step.",
        "train_step",
        "step",
        "entropy",
        "entropy (nats)",
    )
    yield "Test accuracy, greedy and voted", _accuracy_bars(comparison, styles)
    yield "pass@k", _pass_chart(comparison, styles)
    yield lines("reward", "Reward over iterations", train, "collection", "iteration", "reward", "mean reward")
    yield lines(
        "distinct",
        "Distinct-4 over iterations",
        f"Share of distinct 4-grams among a problem's responses. {train}",
        "collection",
        "iteration",
        "distinct_4",
        "Distinct-4",
    )
    yield lines("kl", "KL to the reference policy", train, "collection", "iteration", "kl", "KL (nats)")
    yield lines(
        "well-formed",
        "Well-formed answers",
        f"Share of responses that end by themselves with one final answer. {train}",
        "collection",
        "iteration",
        "well_formed",
        "share",
    )
    yield "Test accuracy during training", _interim_chart(record, comparison, styles)
    yield lines(
        "exploration",
        "Exploration term",
        "Mean of log pi_theta - log pi_old on samples of pi_old, before its "
        "weight: zero at an iteration's first step, negative once the policy has moved away.",
        "train_step",
        "step",
        "exploration",
        "value (nats)",
    )
    yield lines(
        "floor",
        "Floored tokens",
        "Share of response tokens whose log-ratio lies at the floor, where the exploration term has no gradient.",
        "train_step",
        "step",
        "floor_fraction",
        "share of tokens",
    )
    yield lines(
        "warm-up",
        "Warm-up loss",
        "Supervised loss of the start that all arms share.",
        "sft_step",
        "step",
        "loss",
        "loss (nats a token)",
        [START],
    )


def _column(record: RunRecord, kind: str, arm: str, x: str, y: str) -> Series:
    found = record.of(kind, arm)
    return Series([number(line.get(x)) for line in found], [number(line.get(y)) for line in found])


def line_chart(
    key: str,
    title: str,
    caption: str,
    series: Mapping[str, Series],
    styles: Mapping[str, ArmStyle],
    *,
    x_title: str,
    y_title: str,
    marks: Sequence[go.Scatter] = (),
    level: float | None = None,
) -> Chart | None:
    """One line for each arm that has values; None if none has. ``level`` draws a vertical line at that x."""
    drawn = {arm: line for arm, line in series.items() if not line.empty}
    if not drawn:
        return None
    figure = go.Figure()
    for arm, line in drawn.items():
        if line.band:
            figure.add_traces(_band(line, styles[arm]))
        figure.add_trace(_line(line, styles[arm]))
    figure.add_traces(list(marks))
    if level is not None:
        figure.add_vline(level, line={"color": START_COLOR, "width": 1, "dash": "dash"})
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=y_title)
    return Chart(key, title, caption, tuple(styles[arm] for arm in drawn), chart_html(figure, key))


def _line(line: Series, style: ArmStyle) -> go.Scatter:
    mode = "lines+markers" if len(line.x) <= MOST_MARKERS else "lines"
    return go.Scatter(
        x=_gaps(line.x),
        y=_gaps(line.y),
        name=html.escape(style.label),
        mode=mode,
        line={"color": style.color, "dash": style.dash, "width": 2},
        marker={"symbol": style.symbol, "size": 6},
        hovertemplate="%{y:.4g}",
    )


def _band(line: Series, style: ArmStyle) -> list[go.Scatter]:
    low, high = line.band
    common = {"x": _gaps(line.x), "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        go.Scatter(y=_gaps(low), **common),
        go.Scatter(y=_gaps(high), fill="tonexty", fillcolor=style.faded(0.13), **common),
    ]


def _gaps(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _matched_chart(record: RunRecord, comparison: Comparison, styles: Mapping[str, ArmStyle]) -> Chart | None:
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


def _accuracy_bars(comparison: Comparison, styles: Mapping[str, ArmStyle]) -> Chart | None:
    metrics = [m for m in ("greedy_accuracy", largest(comparison.metrics, "vote@")) if m in comparison.metrics]
    figure, drawn = go.Figure(), []
    for arm, row in comparison.table.items():
        found = {metric: row[metric] for metric in metrics if row[metric] is not None}
        if not found:
            continue
        drawn.append(styles[arm])
        figure.add_trace(
            go.Bar(
                x=[metric_name(metric) for metric in found],
                y=[cell.mean for cell in found.values()],
                name=html.escape(styles[arm].label),
                marker_color=styles[arm].color,
                hovertemplate="%{y:.3f}",
                error_y={
                    "array": [cell.high - cell.mean for cell in found.values()],
                    "arrayminus": [cell.mean - cell.low for cell in found.values()],
                    "thickness": 1.5,
                    "width": 4,
                    "color": START_COLOR,
                },
            )
        )
    if not drawn:
        return None
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.12)
    figure.update_yaxes(title_text="share of test problems", rangemode="tozero")
    return Chart(
        "accuracy",
        "Test accuracy, greedy and voted",
        "Bars stand in the order of the legend, with 95 % intervals over the test problems.",
        tuple(drawn),
        chart_html(figure, "accuracy"),
    )


def _pass_chart(comparison: Comparison, styles: Mapping[str, ArmStyle]) -> Chart | None:
    metrics = sorted((m for m in comparison.metrics if m.startswith("pass@")), key=metric_order)
    series = {
        arm: _interval_series([metric_order(m)[1] for m in metrics], [row[m] for m in metrics])
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


def _interval_series(x: Sequence[float], cells: Sequence[Interval | None]) -> Series:
    known = [cell or Interval(math.nan, math.nan, math.nan) for cell in cells]
    return Series(x, [c.mean for c in known], ([c.low for c in known], [c.high for c in known]))


def _interim_chart(record: RunRecord, comparison: Comparison, styles: Mapping[str, ArmStyle]) -> Chart | None:
    """Short evaluations during training; None without any, since the final ones have their own chart."""
    if all(line["kind"] != "evaluation" or line.get("final") for line in record.lines):
        return None
    series = {}
    for arm in record.arms:
        cells = [(line["iteration"], line["metrics"].get("greedy_accuracy")) for line in record.of("evaluation", arm)]
        known = [
            (x, Interval(*(number(cell.get(key)) for key in ("mean", "low", "high")))) for x, cell in cells if cell
        ]
        series[arm] = _interval_series([x for x, _ in known], [cell for _, cell in known])
    return line_chart(
        "interim",
        "Test accuracy during training",
        "Greedy accuracy on the test problems, with 95 % bands.",
        series,
        styles,
        x_title="iteration",
        y_title="greedy accuracy",
    )


def chart_html(figure: go.Figure, key: str) -> str:
    """The figure in the report's style, as a fragment without plotly's script."""
    axis: dict[str, Any] = {
        "gridcolor": "rgba(128,128,128,0.25)",
        "zeroline": False,
        "automargin": True,
        "linecolor": "rgba(128,128,128,0.6)",
        "title_standoff": 8,
        "title_font_size": 12,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_layout(
        template="none",
        font=FONT,
        showlegend=False,
        height=300,
        hovermode="closest",
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,
    )
    return figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"chart-{key}",
        default_height="300px",
        config={"responsive": True, "displayModeBar": False},
    )
