"""Drawing for the report: plotly figures as fragments of HTML, one style for each arm throughout.

A value that is missing or not finite leaves a gap; it is never drawn as zero.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nemo_edo.evaluation.results import START
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
HEIGHT = 268
"""Pixels of a chart: two next to each other fit on a first screen of 800 under the table."""
FONT = {"family": "system-ui, sans-serif", "size": 12}


@dataclass(frozen=True)
class ArmStyle:
    label: str
    color: str
    dash: str
    symbol: str

    def faded(self, alpha: float) -> str:
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    caption: str
    legend: tuple[ArmStyle, ...]
    html: str


Styles = Mapping[str, ArmStyle]
Line: TypeAlias = pd.DataFrame
"""One arm's line: its index has x; the columns are y, for a band ``low`` and ``high``, and ``note``, what pointing at
a point says as well."""


def arm_styles(labels: Mapping[str, str]) -> dict[str, ArmStyle]:
    """A colour, dash and symbol for each arm; grey dots for the start."""
    dashes, symbols = list(DASHES), list(SYMBOLS)
    styles = {START: ArmStyle(labels[START], START_COLOR, "dot", "circle")} if START in labels else {}
    for index, arm in enumerate(arm for arm in labels if arm != START):
        color, dash, symbol = (choices[index % len(choices)] for choices in (COLORS, dashes, symbols))
        styles[arm] = ArmStyle(labels[arm], color, dash, symbol)
    return styles


def line_chart(
    key: str,
    title: str,
    caption: str,
    lines: Mapping[str, Line],
    styles: Styles,
    *,
    x_title: str,
    y_title: str,
    marks: Sequence[go.Scatter] = (),
    level: float | None = None,
    ticks: Sequence[str] = (),
) -> Chart | None:
    """One line for each arm that has values; None if none has. ``level`` draws a vertical line at that x. ``ticks``:
    the words at x = 0, 1, 2, ... where x is not a number."""
    drawn = {arm: line for arm, line in lines.items() if (np.isfinite(line["y"]) & line.index.notna()).any()}
    if not drawn:
        return None
    figure, known = go.Figure(), set()
    for arm, line in drawn.items():
        style, label, x = styles[arm], html.escape(styles[arm].label), _gaps(line.index)
        bands = [_gaps(line[end]) for end in ("low", "high") if end in line]
        for place, y in enumerate(bands):
            fill = {"fill": "tonexty", "fillcolor": style.faded(0.13)} if place else {}
            figure.add_scatter(x=x, y=y, mode="lines", line={"width": 0}, hoverinfo="skip", **fill)
        figure.add_scatter(
            x=x,
            y=_gaps(line["y"]),
            name=label,
            mode="lines+markers" if len(line) <= MOST_MARKERS else "lines",
            line={"color": style.color, "dash": style.dash, "width": 2},
            marker={"symbol": style.symbol, "size": 6},
            text=line["note"].tolist() if "note" in line else [],
            hovertemplate=f"<b>{label}</b><br>{html.escape(x_title)} %{{x:.4g}}<br>{html.escape(y_title)} %{{y:.4g}}"
            "<br>%{text}<extra></extra>",
        )
        known.update(value for values in (*bands, _gaps(line["y"])) for value in values if value is not None)
    figure.add_traces(list(marks))
    if level is not None:
        figure.add_vline(level, line={"color": START_COLOR, "width": 1, "dash": "dash"})
    figure.update_xaxes(title_text=x_title)
    if ticks:
        figure.update_xaxes(tickvals=list(range(len(ticks))), ticktext=list(ticks))
    figure.update_yaxes(title_text=y_title)
    if len(known) == 1:  # around which plotly would show one more and one less: a share of -0.5
        [value] = known
        figure.update_yaxes(range=sorted((0.0, 2 * value or 1.0)))
    return chart(key, title, caption, figure, [styles[arm] for arm in drawn])


def _gaps(values: pd.Series | pd.Index) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def interval_line(x: Sequence[float], cells: Sequence[Interval | None]) -> Line:
    """A line of the means with a band of the intervals; without a band where no interval has ends."""
    known = [(math.nan,) * 3 if cell is None else (cell.mean, cell.low, cell.high) for cell in cells]
    line = pd.DataFrame(known, x, ["y", "low", "high"], dtype=float)
    return line if line["low"].notna().any() else line[["y"]]


def over_seeds(curves: Sequence[pd.Series]) -> Line:
    """The mean of the seeds' curves at the x that all of them have, NaN where a seed has no finite value; with the band
    between the lowest and the highest seed where there are several."""
    table = pd.concat(curves, axis=1, join="inner").sort_index() if curves else pd.DataFrame(dtype=float)
    line = pd.DataFrame({"y": table.mean(axis=1, skipna=False)})
    if len(curves) > 1:
        line["low"], line["high"] = table.min(axis=1, skipna=False), table.max(axis=1, skipna=False)
    return line


def chart(key: str, title: str, caption: str, figure: go.Figure, legend: Sequence[ArmStyle]) -> Chart:
    """The figure in the report's style, as a fragment of HTML without plotly's script."""
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True}
    axis |= {"linecolor": "rgba(128,128,128,0.6)", "title_standoff": 8, "title_font_size": 12}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    layout = {"font": FONT, "showlegend": False, "height": HEIGHT, "margin": {"l": 8, "r": 12, "t": 8, "b": 8}}
    clear = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    figure.update_layout(template="none", **layout, hovermode="closest", **clear, dragmode=False)
    text = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"chart-{key}",
        default_height=f"{HEIGHT}px",
        config={"responsive": True, "displayModeBar": False},
    )
    # A module runs once the page is parsed: before, the chart's column is as wide as the page, as it is the only one.
    text = text.replace("<script>", '<script type="module">', 1)
    return Chart(key, title, caption, tuple(legend), text)
