"""The first screen's charts: differences from the baseline with the noise of training, and accuracy over training."""

from __future__ import annotations

import html

import plotly.graph_objects as go

from nemo_edo.evaluation.results import metric_name
from nemo_edo.report.comparison import Comparison, Difference
from nemo_edo.report.conclusions import direction
from nemo_edo.report.plotting import START_COLOR, ArmStyle, Chart, chart_html

NOISE_COLOR = "rgba(128,128,128,0.22)"
SPREAD = 0.7
"""Of a metric's row, the part over which its arms are spread."""


def forest_chart(comparison: Comparison, styles: dict[str, ArmStyle], metrics: list[str]) -> Chart | None:
    """A row for each metric, in it a mark with a 95 % interval for each arm; None without differences.

    With one run a grey band in each row reaches as far from zero as two trainings of the baseline lie apart.
    """
    arms = list(dict.fromkeys(difference.arm for difference in comparison.differences))
    rows = [metric for metric in metrics if any(d.metric == metric for d in comparison.differences)]
    if not rows:
        return None
    figure = go.Figure()
    noise = comparison.replicate.noise if comparison.replicate and comparison.is_one else {}
    for place, metric in enumerate(rows):
        if metric in noise:
            edges = {"x0": -noise[metric], "x1": noise[metric], "y0": place - 0.45, "y1": place + 0.45}
            figure.add_shape(type="rect", layer="below", line_width=0, fillcolor=NOISE_COLOR, **edges)
    figure.add_vline(0, line={"color": START_COLOR, "width": 1})
    for index, arm in enumerate(arms):
        offset = SPREAD * ((index + 0.5) / len(arms) - 0.5)
        found = {place: comparison.difference(arm, metric) for place, metric in enumerate(rows)}
        marks = {place + offset: difference for place, difference in found.items() if difference}
        figure.add_trace(_marks(marks, styles[arm], noise))
    figure.update_xaxes(title_text=f"difference from {html.escape(comparison.labels[comparison.baseline])}")
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[metric_name(metric).removesuffix(" (nats)") for metric in rows],
        range=[len(rows) - 0.5, -0.5],
        showgrid=False,
    )
    over = "the test problems" if comparison.is_one else "seeds"
    caption = f"95 % intervals over {over}." + (
        f" Grey: how far apart two trainings of {comparison.replicate.label} ended, a single measure of the noise."
        if noise
        else ""
    )
    legend = tuple(styles[arm] for arm in arms)
    title = f"Differences from {comparison.labels[comparison.baseline]}"
    return Chart("differences", title, caption, legend, chart_html(figure, "differences"))


def _marks(marks: dict[float, Difference], style: ArmStyle, noise: dict[str, float]) -> go.Scatter:
    ends = [(d.interval.high - d.interval.mean, d.interval.mean - d.interval.low) for d in marks.values()]
    known = [d.known for d in marks.values()]
    return go.Scatter(
        x=[d.interval.mean for d in marks.values()],
        y=list(marks),
        mode="markers",
        name=html.escape(style.label),
        marker={"symbol": style.symbol, "size": 8, "color": style.color},
        error_x={
            "array": [above if has else None for (above, _), has in zip(ends, known, strict=True)],
            "arrayminus": [below if has else None for (_, below), has in zip(ends, known, strict=True)],
            "thickness": 1.5,
            "width": 3,
        },
        text=[_hover(d, noise) for d in marks.values()],
        hovertemplate=f"<b>{html.escape(style.label)}</b><br>%{{text}}<extra></extra>",
    )


def _hover(difference: Difference, noise: dict[str, float]) -> str:
    interval, metric = difference.interval, difference.metric
    ends = f" [{interval.low:+.3f}, {interval.high:+.3f}]" if difference.known else ""
    apart = f"<br>noise of training ±{noise[metric]:.3f}" if metric in noise else ""
    return f"{metric_name(metric)} {interval.mean:+.3f}{ends}{apart}<br>{direction(difference)}"
