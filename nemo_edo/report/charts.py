"""The charts of a report by section. One without values is left out, and the page names it.

A line is the mean over seeds with a band from the lowest to the highest; with one run it is that run's, with the
interval over problems where there is one. Values of optimizer steps are averaged over each iteration: within one they
go up and down by construction.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nemo_edo.config.arms import REPLICATE
from nemo_edo.evaluation.results import START, largest, metric_name
from nemo_edo.report.charts_over_k import PROBLEMS_BAND, SEEDS_BAND, over_k_charts
from nemo_edo.report.comparison import Comparison, Estimate
from nemo_edo.report.conclusions import direction, plain, signed
from nemo_edo.report.plotting import (
    MOST_MARKERS,
    START_COLOR,
    ArmStyle,
    Chart,
    Line,
    Styles,
    arm_styles,
    chart,
    interval_line,
    line_chart,
    over_seeds,
)
from nemo_edo.report.run_record import START_LABEL, setting
from nemo_edo.report.run_set import Trained

FEWEST_ALPHAS = 3
"""The fewest alphas of a family that make a curve."""
ALPHA_FAMILIES = {"ED-GRPO": "GRPO", "ED-iDPO": "ETO"}
"""Family of arms that differ in alpha -> the label of the same arm without exploration."""
NOISE_COLOR = "rgba(128,128,128,0.22)"
SPREAD = 0.7
"""Of a metric's row in the forest, the part over which its arms are spread."""


class Curves(NamedTuple):
    """A line for each arm, of a value that lines of metrics.jsonl of one kind have."""

    key: str
    title: str
    caption: str
    """With the runs' temperatures in place of {}."""
    kind: str
    y: str
    y_title: str


_TRAIN = "Training problems, sampled at temperature {} from the policy at the start of each iteration."
_REWARD = Curves("reward", "Reward over iterations", _TRAIN, "collection", "reward", "mean reward")
_DIAGNOSTICS = (
    Curves("entropy", "Entropy over training", "The policy's entropy, mean over sampled response tokens.",
           "train_step", "entropy", "entropy (nats)"),
    Curves("distinct", "Distinct-4 over iterations", f"Share of distinct 4-grams among a problem's responses. {_TRAIN}",
           "collection", "distinct_4", "Distinct-4"),
    Curves("kl", "KL to the reference policy", _TRAIN, "collection", "kl", "KL (nats)"),
    Curves("well-formed", "Well-formed answers",
           f"Share of responses that end by themselves with one final answer. {_TRAIN}",
           "collection", "well_formed", "share"),
    Curves("exploration", "Exploration term",
           "Mean of log pi_theta - log pi_old on samples of pi_old, before its weight: negative once the policy has "
           "moved away from them; a floor can lift it above zero.", "train_step", "exploration", "value (nats)"),
    Curves("floor", "Floored tokens",
           "Share of response tokens whose log-ratio is at the floor, where the exploration term has no gradient.",
           "train_step", "floor_fraction", "share of tokens"),
    Curves("warm-up", "Warm-up loss", "Supervised loss of the start that all arms share.",
           "sft_step", "loss", "loss (nats per token)"),
)  # fmt: skip


@dataclass(frozen=True)
class Charts:
    """The charts of each section that have something to draw."""

    first: list[Chart]
    """Of the first screen."""
    diversity: list[Chart]
    test_time: list[Chart]
    diagnostics: list[Chart]
    undrawn: list[str]
    """The titles of those that have nothing."""


def all_charts(comparison: Comparison, metrics: list[str]) -> Charts:
    """``metrics``: of the table on the first screen. Charts of what only some runs have, responses stored for more
    compute at test time, several alphas or test results during training, are not missed."""
    styles = arm_styles({START: START_LABEL} | comparison.labels)
    if comparison.replicate:
        styles[REPLICATE] = ArmStyle(f"{comparison.replicate}, replicate", START_COLOR, "longdash", "circle")
    test = _interim_chart(comparison, styles, "greedy_accuracy", "Greedy test accuracy")
    found = {row.title: _curves_chart(comparison, styles, row) for row in (_REWARD, *_DIAGNOSTICS)}
    first = [forest_chart(comparison, styles, metrics), test or found.pop(_REWARD.title)]
    diversity = [_matched_chart(comparison, styles), _frontier(comparison, styles), *_alpha_charts(comparison)]
    later = _interim_chart(comparison, styles, "distinct_4", "Distinct-4 on the test problems")
    return Charts(
        first=[drawn for drawn in first if drawn],
        diversity=[drawn for drawn in diversity if drawn],
        test_time=over_k_charts(comparison, styles),
        diagnostics=[drawn for drawn in (*found.values(), later) if drawn],
        undrawn=[title for title, drawn in found.items() if not drawn],
    )


# --- the first screen -------------------------------------------------------------------------------------------------


def forest_chart(comparison: Comparison, styles: Styles, metrics: list[str]) -> Chart | None:
    """A row for each metric, in it a mark with a 95 % interval for each arm; None without differences.

    With one run a grey band in each row reaches as far from zero as two trainings of the baseline lie apart.
    """
    arms = list(dict.fromkeys(difference.arm for difference in comparison.differences))
    rows = [metric for metric in metrics if any(d.metric == metric for d in comparison.differences)]
    if not rows:
        return None
    figure, baseline = go.Figure(), comparison.labels[comparison.baseline]
    noise = comparison.noise if comparison.is_one else {}
    for place, metric in enumerate(rows):
        if metric in noise:
            edges = {"x0": -noise[metric], "x1": noise[metric], "y0": place - 0.45, "y1": place + 0.45}
            figure.add_shape(type="rect", layer="below", line_width=0, fillcolor=NOISE_COLOR, **edges)
    figure.add_vline(0, line={"color": START_COLOR, "width": 1})
    for index, arm in enumerate(arms):
        offset = SPREAD * ((index + 0.5) / len(arms) - 0.5)
        found = [(place, one) for place, metric in enumerate(rows) if (one := comparison.difference(arm, metric))]
        apart = [f"<br>noise of training ±{noise[d.metric]:.3f}" if d.metric in noise else "" for _, d in found]
        figure.add_scatter(
            x=[d.interval.mean for _, d in found],
            y=[place + offset for place, _ in found],
            error_x=_bars([d for _, d in found], thickness=1.5),
            text=[
                f"{metric_name(d.metric)} {signed(d)}{far}<br>{direction(d)}"
                for (_, d), far in zip(found, apart, strict=True)
            ],
            hovertemplate=f"<b>{html.escape(styles[arm].label)}</b><br>%{{text}}<extra></extra>",
            **_mark(styles[arm], 8),
        )
    figure.update_xaxes(title_text=f"difference from {html.escape(baseline)}")
    names = {"tickvals": list(range(len(rows))), "ticktext": [plain(metric) for metric in rows]}
    figure.update_yaxes(range=[len(rows) - 0.5, -0.5], showgrid=False, **names)
    caption = f"95 % intervals over {'the test problems' if comparison.is_one else 'seeds'}."
    if noise:
        caption += f" Grey: how far apart two trainings of {comparison.replicate} ended, a single measure of the noise."
    return chart("differences", f"Differences from {baseline}", caption, figure, [styles[arm] for arm in arms])


def _mark(style: ArmStyle, size: int) -> dict:
    marker = {"symbol": style.symbol, "size": size, "color": style.color}
    return {"mode": "markers", "name": html.escape(style.label), "marker": marker}


def _bars(cells: Sequence[Estimate], **options: object) -> dict:
    """Error bars of the intervals, where they are known."""
    above = [cell.interval.high - cell.interval.mean if cell.known else None for cell in cells]
    below = [cell.interval.mean - cell.interval.low if cell.known else None for cell in cells]
    return {"array": above, "arrayminus": below, "width": 3, **options}


# --- over the training ------------------------------------------------------------------------------------------------


def _trainings(comparison: Comparison) -> dict[str, list[Trained]]:
    """The arms in every seed, and the baseline's replicate."""
    return {name: list(found.values()) for name, found in comparison.runs.policies.items() if name != START}


def _curves_chart(comparison: Comparison, styles: Styles, curves: Curves) -> Chart | None:
    key, title, caption, kind, y, y_title = curves
    trainings, x_title = _trainings(comparison), "iteration"
    if kind == "sft_step":
        records = {record.seed: record for record in comparison.runs.records}.values()
        trainings, x_title = {START: [Trained(record, START) for record in records]}, "optimizer step"
    lines = {arm: over_seeds([_by_x(trained, kind, y) for trained in found]) for arm, found in trainings.items()}
    temperatures = {f"{setting(record, 'sampling.temperature'):g}": None for record in comparison.runs.records}
    caption = caption.format(" or ".join(temperatures)) + ("" if comparison.is_one else SEEDS_BAND)
    return line_chart(key, title, caption, lines, styles, x_title=x_title, y_title=y_title)


def _by_x(trained: Trained, kind: str, y: str) -> pd.Series:
    """The values by iteration, of optimizer steps their means; of the warm-up the means of blocks of steps, by the
    last step of each."""
    lines = trained.lines(kind)
    x = lines["iteration"]
    if kind == "collection":
        return lines.drop_duplicates("iteration", keep="last").set_index("iteration")[y]
    if kind == "sft_step":
        size = max(math.ceil(len(lines) / MOST_MARKERS), 1)
        x = np.ceil(lines["step"] / size) * size
    return lines[y].groupby(x).mean()


def _interim_chart(comparison: Comparison, styles: Styles, metric: str, title: str) -> Chart | None:
    """Evaluations during training; without any there is no curve."""
    lines = {}
    for arm, found in _trainings(comparison).items():
        cells = [_interim(trained, metric) for trained in found]
        lines[arm] = cells[0] if comparison.is_one else over_seeds([one["y"] for one in cells])
    caption = "Test problems, at each evaluation during training and at the end."
    caption += PROBLEMS_BAND if comparison.is_one else SEEDS_BAND
    axes = {"x_title": "iteration", "y_title": metric_name(metric)}
    return line_chart(f"test-{metric}", title, caption, lines, styles, **axes)


def _interim(trained: Trained, metric: str) -> Line:
    """The metric by iteration; an evaluation that was repeated replaces the one before."""
    lines = trained.lines("evaluation")
    if lines["final"].eq(True).all():
        lines = lines.iloc[:0]
    last = lines.drop_duplicates("iteration", keep="last")
    cells = {x: one[metric] for x, one in zip(last["iteration"], last["metrics"], strict=True) if one.get(metric)}
    ends = [[cell.get(end) for end in ("mean", "low", "high")] for cell in cells.values()]
    return pd.DataFrame(ends, list(cells), ["y", "low", "high"], dtype=float)


# --- diversity --------------------------------------------------------------------------------------------------------


def _matched_chart(comparison: Comparison, styles: Styles) -> Chart | None:
    accuracies = comparison.matched.accuracies
    caption = (
        "Each mark is one collection on the training problems; the policy moves right as it learns. Compare arms where "
        "their accuracy is the same."
    )
    if not comparison.is_one:
        caption += " Marks are means over seeds."
    level = sum(accuracies.values()) / len(accuracies) if accuracies else None
    if level is not None:
        caption += f" The dashed line is the matched accuracy {level:.3f}, large marks are the means around it."
    marks = []
    for arm, value in comparison.matched.values["entropy"].items():
        mark = go.Scatter(
            x=[level], y=[value.interval.mean], hovertemplate="matched: %{y:.4g}", **_mark(styles[arm], 13)
        )
        marks.append(mark.update(marker_line={"width": 1.5, "color": "white"}))
    lines = {}
    for arm, by_seed in comparison.arms.items():
        reward, entropy = (
            over_seeds([_by_x(one, "collection", y) for one in by_seed.values()])["y"] for y in ("reward", "entropy")
        )
        lines[arm] = pd.DataFrame({"y": entropy.to_numpy()}, reward)
    axes = {"x_title": "sampled training accuracy", "y_title": "entropy (nats)"}
    return line_chart("matched", "Entropy against accuracy", caption, lines, styles, marks=marks, level=level, **axes)


def _frontier(comparison: Comparison, styles: Styles) -> Chart | None:
    """Each trained arm at its means with its intervals; a line joins those that no other beats."""
    metric = largest(comparison.metrics, "vote@") or "greedy_accuracy"
    pairs = {arm: (comparison.cell(arm, "distinct_4"), comparison.cell(arm, metric)) for arm in comparison.arms}
    cells = {arm: pair for arm, pair in pairs.items() if all(pair)}
    if not cells:
        return None
    means = {arm: (x.interval.mean, y.interval.mean) for arm, (x, y) in cells.items()}
    xs, ys = zip(*(means[arm] for arm in pareto_front(means)), strict=True)
    figure = go.Figure()
    figure.add_scatter(
        x=xs, y=ys, mode="lines", line={"color": START_COLOR, "width": 1, "dash": "dash"}, hoverinfo="skip"
    )
    for arm, (x, y) in cells.items():
        bars = [_bars([cell], thickness=1, color=styles[arm].faded(0.5)) if cell.known else None for cell in (x, y)]
        figure.add_scatter(
            x=[x.interval.mean],
            y=[y.interval.mean],
            error_x=bars[0],
            error_y=bars[1],
            hovertemplate="%{x:.3f}, %{y:.3f}",
            **_mark(styles[arm], 11),
        )
    figure.update_xaxes(title_text="Distinct-4")
    figure.update_yaxes(title_text=metric_name(metric))
    chance = "the test problems" if comparison.is_one else "seeds where an arm has several"
    caption = (
        f"Means with 95 % intervals over {chance}. The dashed line joins the arms that no other arm beats in both "
        "means; differences along it that are smaller than the intervals are not evidence."
    )
    title = f"Frontier: {metric_name(metric)} against Distinct-4"
    return chart(f"frontier-{metric.replace('@', '-')}", title, caption, figure, [styles[arm] for arm in cells])


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names of the points that no other beats in one coordinate without losing in the other, by rising x."""
    front = [
        name
        for name, (x, y) in points.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())
    ]
    return sorted(front, key=points.__getitem__)


def _alpha_charts(comparison: Comparison) -> list[Chart]:
    """The voted accuracy and Distinct-4 against alpha, a line for each family of arms that differ in alpha alone."""
    families: dict[str, dict[float, str]] = {family: {} for family in ALPHA_FAMILIES}
    for arm, by_seed in comparison.arms.items():
        settings = next(iter(by_seed.values())).settings
        for family, without in ALPHA_FAMILIES.items():  # their labels say that alpha is all that sets them apart
            if settings.alpha is not None and settings.label in (without, f"{family} α={settings.alpha:g}"):
                families[family][settings.alpha] = arm
    families = {family: dict(sorted(arms.items())) for family, arms in families.items() if len(arms) >= FEWEST_ALPHAS}
    alphas = sorted({alpha for arms in families.values() for alpha in arms})
    charts = []
    for metric in (largest(comparison.metrics, "vote@"), "distinct_4"):
        if metric not in comparison.metrics:
            continue
        lines = {}
        for family, arms in families.items():
            cells = [comparison.cell(arm, metric) for arm in arms.values()]
            lines[family] = interval_line([alphas.index(alpha) for alpha in arms], [c and c.interval for c in cells])
        caption = "Final policies on the test problems, with 95 % bands. Alphas are at even distances; 0 is without "
        title, ticks = f"Sensitivity to alpha: {metric_name(metric)}", [f"{alpha:g}" for alpha in alphas]
        axes = {"x_title": "alpha", "y_title": metric_name(metric), "ticks": ticks}
        styles = arm_styles({family: family for family in families})
        drawn = line_chart(f"alpha-{metric.replace('@', '-')}", title, f"{caption}exploration.", lines, styles, **axes)
        charts += [drawn] if drawn else []
    return charts
