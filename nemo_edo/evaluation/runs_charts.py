"""The charts of several runs: the frontier of accuracy against diversity, and curves with a band over seeds."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import plotly.graph_objects as go

from nemo_edo.evaluation.alpha_charts import alpha_charts, alpha_points
from nemo_edo.evaluation.comparison import START, START_LABEL, Evaluation, largest, metric_name, metric_order
from nemo_edo.evaluation.drawing import (
    START_COLOR,
    ArmStyle,
    Chart,
    Series,
    arm_styles,
    bar_chart,
    chart_html,
    line_chart,
)
from nemo_edo.evaluation.run_record import number
from nemo_edo.evaluation.run_set import Trained
from nemo_edo.evaluation.runs_comparison import OverSeeds, RunsComparison
from nemo_edo.evaluation.scaling_charts import (
    both_charts,
    families,
    mean_tokens,
    metric_at,
    numbers_of_responses,
)
from nemo_edo.evaluation.test_time_record import read_test_time

BAND = "The line is the mean over seeds, the band reaches from the lowest to the highest seed."
Point = tuple[float, float]
"""(x, y) of a curve."""


def runs_charts(comparison: RunsComparison) -> tuple[list[Chart], list[str]]:
    """The charts that have something to draw, and the titles of those that have not."""
    styles = _styles(comparison)
    found = dict(_charts(comparison, styles))
    settings = {arm: next(iter(by_seed.values())).settings for arm, by_seed in comparison.arms.items()}
    table = {
        arm: {metric: cell and cell.interval for metric, cell in row.items()} for arm, row in comparison.table.items()
    }
    charts = [chart for chart in found.values() if chart]
    charts += _scaling_charts(comparison, styles)
    charts += alpha_charts(alpha_points(settings, table), comparison.metrics)
    return charts, [title for title, chart in found.items() if not chart]


def _styles(comparison: RunsComparison) -> dict[str, ArmStyle]:
    styles = arm_styles({START if label == START_LABEL else label: label for label in comparison.labels})
    return {START_LABEL if arm == START else arm: style for arm, style in styles.items()}


def _charts(comparison: RunsComparison, styles: Mapping[str, ArmStyle]) -> Iterable[tuple[str, Chart | None]]:
    for metric in ("greedy_accuracy", largest(comparison.metrics, "vote@"), largest(comparison.metrics, "pass@")):
        if metric:
            title = f"Frontier: {metric_name(metric)} against Distinct-4"
            yield title, frontier_chart(comparison, styles, metric, title)
    yield "pass@k", _pass_chart(comparison, styles)
    yield "Distinct-4 on the test problems", _distinct_bars(comparison, styles)
    train = "Training problems, sampled at temperature 1 from the policy at the start of each iteration."
    test = "Test problems, at each evaluation during training and at the end."
    for key, title, y_title, caption, points in (
        ("test", "Greedy test accuracy over iterations", "greedy accuracy", test, _evaluated("greedy_accuracy")),
        ("test-distinct", "Distinct-4 on test problems over iterations", "Distinct-4", test, _evaluated("distinct_4")),
        ("reward", "Reward over iterations", "mean reward", train, _collected("iteration", "reward")),
        ("distinct", "Distinct-4 over iterations", "Distinct-4", train, _collected("iteration", "distinct_4")),
        ("entropy", "Entropy over iterations", "entropy (nats)", train, _collected("iteration", "entropy")),
    ):
        series = {arm: over_seeds([points(t) for t in by_seed.values()]) for arm, by_seed in comparison.arms.items()}
        x_title = "iteration"
        yield title, line_chart(key, title, f"{caption} {BAND}", series, styles, x_title=x_title, y_title=y_title)


def _scaling_charts(comparison: RunsComparison, styles: Mapping[str, ArmStyle]) -> list[Chart]:
    """More compute at test time, of the arms whose runs have ``test_time/ARM.json``."""
    stored = {
        arm: [found[t.name] for t in by_seed.values() if t.name in (found := read_test_time(t.record))]
        for arm, by_seed in comparison.arms.items()
    }
    charts = []
    for family, name, caption in families(evaluation for found in stored.values() for evaluation in found):
        by_k = {arm: over_seeds([_points(one, family) for one in found]) for arm, found in stored.items() if found}
        by_tokens = {
            arm: Series(
                [sum(mean_tokens(one, int(k)) for one in stored[arm]) / len(stored[arm]) for k in series.x],
                series.y,
                series.band,
            )
            for arm, series in by_k.items()
        }
        charts += both_charts(family, name, f"{caption} {BAND}", by_k, by_tokens, styles)
    return charts


def _points(evaluation: Evaluation, family: str) -> list[Point]:
    ratios = {k: evaluation.metrics[metric_at(family, k)] for k in numbers_of_responses(evaluation, family)}
    return [(k, float(sums_P.sum() / counts_P.sum())) for k, (sums_P, counts_P) in ratios.items()]


def _collected(x: str, y: str) -> Callable[[Trained], list[Point]]:
    return lambda trained: [
        (number(line.get(x)), number(line.get(y))) for line in trained.record.of("collection", trained.name)
    ]


def _evaluated(metric: str) -> Callable[[Trained], list[Point]]:
    def points(trained: Trained) -> list[Point]:
        lines = trained.record.of("evaluation", trained.name)
        if all(line.get("final") for line in lines):
            return []  # the end alone is no curve
        cells = [(line["iteration"], line["metrics"].get(metric) or {}) for line in lines]
        return [(number(iteration), number(cell.get("mean"))) for iteration, cell in cells]

    return points


def over_seeds(curves: Sequence[Sequence[Point]]) -> Series:
    """The mean of the seeds' curves with the band between the lowest and the highest, where all of them have values."""
    values: dict[float, list[float]] = {}
    for points in curves:
        for x, y in dict(points).items():  # an evaluation made anew replaces the one before
            if math.isfinite(x) and math.isfinite(y):
                values.setdefault(x, []).append(y)
    shared = sorted(x for x, found in values.items() if len(found) == len(curves))
    mean = [sum(values[x]) / len(values[x]) for x in shared]
    band = ([min(values[x]) for x in shared], [max(values[x]) for x in shared]) if len(curves) > 1 else None
    return Series(shared, mean, band)


def pareto_front(points: Mapping[str, Point]) -> list[str]:
    """The names of the points that no other beats in one coordinate without losing in the other, by rising x."""
    return sorted(
        (
            name
            for name, (x, y) in points.items()
            if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())
        ),
        key=lambda name: points[name],
    )


def frontier_chart(comparison: RunsComparison, styles: Mapping[str, ArmStyle], metric: str, title: str) -> Chart | None:
    """Each trained arm at its means over seeds, with its t intervals; a line joins those that none other beats."""
    rows = {arm: comparison.table[arm] for arm in comparison.arms}
    cells = {
        arm: (row["distinct_4"], row[metric]) for arm, row in rows.items() if row.get("distinct_4") and row.get(metric)
    }
    if not cells:
        return None
    trained = {arm: (x.interval.mean, y.interval.mean) for arm, (x, y) in cells.items()}
    front = [trained[arm] for arm in pareto_front(trained)]
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in front],
            y=[y for _, y in front],
            mode="lines",
            line={"color": START_COLOR, "width": 1, "dash": "dash"},
            hoverinfo="skip",
        )
    )
    for arm, (x, y) in cells.items():
        figure.add_trace(_mark(x, y, styles[arm]))
    figure.update_xaxes(title_text="Distinct-4")
    figure.update_yaxes(title_text=metric_name(metric))
    key = f"frontier-{metric.replace('@', '-')}"
    caption = (
        "Means over seeds, with Student's t intervals where an arm has several. The dashed line joins the arms that no "
        "other arm beats in both means; differences along it that are smaller than the intervals are no evidence."
    )
    return Chart(key, title, caption, tuple(styles[arm] for arm in cells), chart_html(figure, key))


def _mark(x: OverSeeds, y: OverSeeds, style: ArmStyle) -> go.Scatter:
    def bars(cell: OverSeeds) -> dict | None:
        if not cell.known:
            return None
        half = cell.interval.high - cell.interval.mean
        return {"array": [half], "thickness": 1, "width": 3, "color": style.faded(0.5)}

    return go.Scatter(
        x=[x.interval.mean],
        y=[y.interval.mean],
        mode="markers",
        name=html.escape(style.label),
        marker={"symbol": style.symbol, "size": 11, "color": style.color},
        error_x=bars(x),
        error_y=bars(y),
        hovertemplate="%{x:.3f}, %{y:.3f}",
    )


def _pass_chart(comparison: RunsComparison, styles: Mapping[str, ArmStyle]) -> Chart | None:
    metrics = sorted((m for m in comparison.metrics if m.startswith("pass@")), key=metric_order)
    series = {
        arm: over_seeds(
            [
                [(metric_order(m)[1], cell.by_seed[seed]) for m in metrics if (cell := row[m]) and seed in cell.by_seed]
                for seed in comparison.seeds_of(arm)
            ]
        )
        for arm, row in comparison.table.items()
    }
    caption = f"Chance that at least one of k responses is correct (unbiased estimate). {BAND}"
    return line_chart("pass", "pass@k", caption, series, styles, x_title="k", y_title="pass@k")


def _distinct_bars(comparison: RunsComparison, styles: Mapping[str, ArmStyle]) -> Chart | None:
    cells = {arm: row.get("distinct_4") for arm, row in comparison.table.items()}
    rows = {arm: {"Distinct-4": cell.interval} for arm, cell in cells.items() if cell}
    caption = "Means over seeds, with Student's t intervals where an arm has several."
    title = "Distinct-4 on the test problems"
    return bar_chart("distinct-bars", title, caption, rows, styles, y_title="Distinct-4")
