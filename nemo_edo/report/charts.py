"""The charts of a report by section. One without values is left out, and the page names it.

A line is the mean over seeds with a band from the lowest to the highest; with one run it is that run's, with the
interval over problems where there is one. Values of optimizer steps are averaged over each iteration: within one they
go up and down by construction.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from nemo_edo.config.arms import REPLICATE
from nemo_edo.evaluation.results import START, Evaluation, largest, metric_name
from nemo_edo.metrics.intervals import Interval
from nemo_edo.report.alpha_charts import alpha_charts
from nemo_edo.report.comparison import Comparison, Estimate
from nemo_edo.report.forest import forest_chart
from nemo_edo.report.plotting import (
    MOST_MARKERS,
    START_COLOR,
    ArmStyle,
    Chart,
    Point,
    Series,
    arm_styles,
    chart_html,
    interval_series,
    line_chart,
    over_seeds,
)
from nemo_edo.report.run_record import START_LABEL, RunRecord, number, read_test_time, setting
from nemo_edo.report.run_set import Trained
from nemo_edo.report.scaling_charts import scaling_charts

Styles = Mapping[str, ArmStyle]
Draw = Callable[[Comparison, Styles], Chart | None]
SEEDS_BAND = " The line is the mean over seeds, the band reaches from the lowest to the highest seed."
PROBLEMS_BAND = " With 95 % bands over the test problems."


@dataclass(frozen=True)
class Curves:
    """A line for each arm, of a value that lines of metrics.jsonl of one kind have."""

    key: str
    title: str
    caption: str
    kind: str
    y: str
    y_title: str

    def __call__(self, comparison: Comparison, styles: Styles) -> Chart | None:
        if self.kind == "sft_step":
            records = {record.seed: record for record in comparison.runs.records}.values()
            curves = {START: [self._points(record, START) for record in records]}
        else:
            curves = {
                arm: [self._points(t.record, t.name) for t in found] for arm, found in _trainings(comparison).items()
            }
        series = {arm: over_seeds(found) for arm, found in curves.items()}
        x_title = "optimizer step" if self.kind == "sft_step" else "iteration"
        temperatures = {f"{setting(record, 'sampling.temperature'):g}": None for record in comparison.runs.records}
        caption = self.caption.format(" or ".join(temperatures)) + ("" if comparison.is_one else SEEDS_BAND)
        return line_chart(self.key, self.title, caption, series, styles, x_title=x_title, y_title=self.y_title)

    def _points(self, record: RunRecord, arm: str) -> list[Point]:
        if self.kind == "collection":
            return _points(record, arm, self.kind, "iteration", self.y)
        if self.kind == "train_step":
            return averaged(_points(record, arm, self.kind, "iteration", self.y))
        points = _points(record, arm, self.kind, "step", self.y)
        size = math.ceil(len(points) / MOST_MARKERS)
        return averaged([(math.ceil(x / size) * size, y) for x, y in points])


def averaged(points: Sequence[Point]) -> list[Point]:
    """The mean of the finite values at each x; NaN where none is."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).extend([y] if math.isfinite(y) else [])
    return [(x, sum(found) / len(found) if found else math.nan) for x, found in by_x.items()]


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
        label = f"{comparison.replicate.label}, replicate"
        styles[REPLICATE] = ArmStyle(label, START_COLOR, "longdash", "circle")
    test = _interim_chart("greedy_accuracy", "Greedy test accuracy")(comparison, styles)
    reward = _REWARD(comparison, styles)
    first = [forest_chart(comparison, styles, metrics), test or reward]
    found = {row.title: row(comparison, styles) for row in _DIAGNOSTICS}
    if test:
        found = {_REWARD.title: reward, **found}
    later = [_interim_chart("distinct_4", "Distinct-4 on the test problems")(comparison, styles)]
    diversity = [_matched_chart(comparison, styles), _frontier(comparison, styles), *alpha_charts(comparison)]
    return Charts(
        first=[chart for chart in first if chart],
        diversity=[chart for chart in diversity if chart],
        test_time=_test_time_charts(comparison, styles),
        diagnostics=[chart for chart in (*found.values(), *later) if chart],
        undrawn=[title for title, chart in found.items() if not chart],
    )


def _test_time_charts(comparison: Comparison, styles: Styles) -> list[Chart]:
    """Votes, pass@k and best-of-k over the stored responses; without them pass@k as it was evaluated."""
    stored = scaling_charts(
        _test_time(comparison),
        styles,
        bands=SEEDS_BAND if not comparison.is_one else PROBLEMS_BAND,
        resamples=setting(comparison.runs.records[0], "evaluation.bootstrap") if comparison.is_one else None,
        seed=comparison.seeds[0],
    )
    return stored or [chart for chart in [_pass_chart(comparison, styles)] if chart]


def _trainings(comparison: Comparison) -> dict[str, list[Trained]]:
    """The arms in every seed, and the baseline's replicate."""
    found = {arm: list(by_seed.values()) for arm, by_seed in comparison.arms.items()}
    again = [Trained(record, REPLICATE) for record in comparison.runs.records if record.replicate is not None]
    return {**found, REPLICATE: again} if again else found


def _points(record: RunRecord, arm: str, kind: str, x: str, y: str) -> list[Point]:
    return [(number(line.get(x)), number(line.get(y))) for line in record.of(kind, arm)]


def _test_time(comparison: Comparison) -> dict[str, list[Evaluation]]:
    """Each policy's test-time evaluations, one for each seed that has any."""
    stored = {record.folder: read_test_time(record) for record in comparison.runs.records}
    names = {START: [(record, START) for record in {r.seed: r for r in comparison.runs.records}.values()]}
    names |= {arm: [(t.record, t.name) for t in by_seed.values()] for arm, by_seed in comparison.arms.items()}
    found = {
        arm: [stored[record.folder][name] for record, name in policies if name in stored[record.folder]]
        for arm, policies in names.items()
    }
    return {arm: evaluations for arm, evaluations in found.items() if evaluations}


def _matched_chart(comparison: Comparison, styles: Styles) -> Chart | None:
    matched = comparison.matched
    caption = (
        "Each mark is one collection on the training problems; the policy moves right as it learns. Compare arms where "
        "their accuracy is the same."
    )
    if not comparison.is_one:
        caption += " Marks are means over seeds."
    level = sum(matched.accuracies.values()) / len(matched.accuracies) if matched.accuracies else None
    if level is not None:
        caption += f" The dashed line is the matched accuracy {level:.3f}, large marks are the means around it."
    marks = [
        go.Scatter(
            x=[level],
            y=[value.interval.mean],
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
    ]
    series = {arm: _path(list(by_seed.values())) for arm, by_seed in comparison.arms.items()}
    axes = {"x_title": "sampled training accuracy", "y_title": "entropy (nats)"}
    return line_chart("matched", "Entropy against accuracy", caption, series, styles, marks=marks, level=level, **axes)


def _path(seeds: Sequence[Trained]) -> Series:
    """The entropy of each collection against its accuracy, both as means over seeds."""
    rewards, entropies = (
        over_seeds([_points(t.record, t.name, "collection", "iteration", key) for t in seeds])
        for key in ("reward", "entropy")
    )
    return Series(rewards.y, entropies.y)


def _chance(comparison: Comparison) -> str:
    return "the test problems" if comparison.is_one else "seeds where an arm has several"


def _pass_chart(comparison: Comparison, styles: Styles) -> Chart | None:
    metrics = [metric for metric in comparison.metrics if re.fullmatch(r"pass@\d+", metric)]
    ks = [int(metric.removeprefix("pass@")) for metric in metrics]
    series = {arm: _estimates(ks, [row[m] for m in metrics]) for arm, row in comparison.table.items()}
    caption = "Chance that at least one of k responses is correct (unbiased estimate)."
    caption += PROBLEMS_BAND if comparison.is_one else SEEDS_BAND
    return line_chart("pass", "pass@k", caption, series, styles, x_title="responses (k)", y_title="pass@k")


def _estimates(x: Sequence[float], cells: Sequence[Estimate | None]) -> Series:
    return interval_series(x, [cell and Interval(cell.interval.mean, *cell.band) for cell in cells])


def _interim_chart(metric: str, title: str) -> Draw:
    """Evaluations during training; without any there is no curve."""

    def draw(comparison: Comparison, styles: Styles) -> Chart | None:
        series = {
            arm: _interim_series([_interim(t, metric) for t in found], comparison.is_one)
            for arm, found in _trainings(comparison).items()
        }
        caption = "Test problems, at each evaluation during training and at the end."
        caption += PROBLEMS_BAND if comparison.is_one else SEEDS_BAND
        axes = {"x_title": "iteration", "y_title": metric_name(metric)}
        return line_chart(f"test-{metric}", title, caption, series, styles, **axes)

    return draw


def _interim(trained: Trained, metric: str) -> dict[float, Interval]:
    """The metric by iteration; an evaluation that was repeated replaces the one before."""
    lines = trained.record.of("evaluation", trained.name)
    if all(line.get("final") for line in lines):
        return {}
    cells = {line["iteration"]: line["metrics"].get(metric) for line in lines}
    return {
        iteration: Interval(*(number(cell.get(key)) for key in ("mean", "low", "high")))
        for iteration, cell in cells.items()
        if cell
    }


def _interim_series(seeds: Sequence[Mapping[float, Interval]], is_one: bool) -> Series:
    if is_one:
        return interval_series(list(seeds[0]), list(seeds[0].values()))
    return over_seeds([[(x, cell.mean) for x, cell in found.items()] for found in seeds])


# --- the frontier -----------------------------------------------------------------------------------------------------


def _frontier(comparison: Comparison, styles: Styles) -> Chart | None:
    metric = largest(comparison.metrics, "vote@") or "greedy_accuracy"
    return frontier_chart(comparison, styles, metric, f"Frontier: {metric_name(metric)} against Distinct-4")


def frontier_chart(comparison: Comparison, styles: Styles, metric: str, title: str) -> Chart | None:
    """Each trained arm at its means with its intervals; a line joins those that no other beats."""
    rows = {arm: comparison.table[arm] for arm in comparison.arms}
    cells = {
        arm: (row["distinct_4"], row[metric]) for arm, row in rows.items() if row.get("distinct_4") and row.get(metric)
    }
    if not cells:
        return None
    means = {arm: (x.interval.mean, y.interval.mean) for arm, (x, y) in cells.items()}
    front = [means[arm] for arm in pareto_front(means)]
    figure = go.Figure()
    xs, ys = zip(*front, strict=True)
    line = {"color": START_COLOR, "width": 1, "dash": "dash"}
    figure.add_trace(go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip"))
    for arm, (x, y) in cells.items():
        figure.add_trace(_mark(x, y, styles[arm]))
    figure.update_xaxes(title_text="Distinct-4")
    figure.update_yaxes(title_text=metric_name(metric))
    key = f"frontier-{metric.replace('@', '-')}"
    caption = (
        f"Means with 95 % intervals over {_chance(comparison)}. The dashed line joins the arms that no other arm beats "
        "in both means; differences along it that are smaller than the intervals are not evidence."
    )
    return Chart(key, title, caption, tuple(styles[arm] for arm in cells), chart_html(figure, key))


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


def _mark(x: Estimate, y: Estimate, style: ArmStyle) -> go.Scatter:
    def bars(cell: Estimate) -> dict | None:
        if not cell.known:
            return None
        above, below = cell.interval.high - cell.interval.mean, cell.interval.mean - cell.interval.low
        return {"array": [above], "arrayminus": [below], "thickness": 1, "width": 3, "color": style.faded(0.5)}

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


# --- the charts of every report ---------------------------------------------------------------------------------------

_TRAIN = "Training problems, sampled at temperature {} from the policy at the start of each iteration."
"""With the runs' temperatures in place of {}."""
_REWARD = Curves("reward", "Reward over iterations", _TRAIN, "collection", "reward", "mean reward")
_DIAGNOSTICS = (
    Curves(
        "entropy",
        "Entropy over training",
        "The policy's entropy, mean over sampled response tokens.",
        *("train_step", "entropy", "entropy (nats)"),
    ),
    Curves(
        "distinct",
        "Distinct-4 over iterations",
        f"Share of distinct 4-grams among a problem's responses. {_TRAIN}",
        *("collection", "distinct_4", "Distinct-4"),
    ),
    Curves("kl", "KL to the reference policy", _TRAIN, "collection", "kl", "KL (nats)"),
    Curves(
        "well-formed",
        "Well-formed answers",
        f"Share of responses that end by themselves with one final answer. {_TRAIN}",
        *("collection", "well_formed", "share"),
    ),
    Curves(
        "exploration",
        "Exploration term",
        "Mean of log pi_theta - log pi_old on samples of pi_old, before its weight: negative once the policy has moved "
        "away from them; a floor can lift it above zero.",
        *("train_step", "exploration", "value (nats)"),
    ),
    Curves(
        "floor",
        "Floored tokens",
        "Share of response tokens whose log-ratio is at the floor, where the exploration term has no gradient.",
        *("train_step", "floor_fraction", "share of tokens"),
    ),
    Curves(
        "warm-up",
        "Warm-up loss",
        "Supervised loss of the start that all arms share.",
        *("sft_step", "loss", "loss (nats per token)"),
    ),
)
