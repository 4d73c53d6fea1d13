"""The charts of a report by section. One without values is left out, and the page names it.

A line is the mean over seeds with a band from the lowest to the highest; with one run it is that run's, with the
interval over problems where there is one. Values of optimizer steps are averaged over each iteration: within one they
go up and down by construction.
"""

import html
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nemo_edo.config.run import REPLICATE
from nemo_edo.evaluation.results import START, Evaluation, largest, metric_name, ratio_intervals
from nemo_edo.evaluation.stored import families
from nemo_edo.report import plotting
from nemo_edo.report.comparison import Comparison, Estimate
from nemo_edo.report.conclusions import direction, plain, signed
from nemo_edo.report.run_set import START_LABEL, Trained, setting

FEWEST_ALPHAS = 3
ALPHA_FAMILIES = {"ED-GRPO": "GRPO", "ED-iDPO": "ETO"}
"""Family of arms that differ in alpha -> the label of the same arm without exploration."""
NOISE_COLOR = "rgba(128,128,128,0.22)"
SPREAD = 0.7
"""The part of a metric's row in the forest over which its arms are spread."""
SEEDS_BAND = " The line is the mean over seeds, the band reaches from the lowest to the highest seed."
PROBLEMS_BAND = " With 95 % bands over the test problems."
MOST_POINTS = 24
"""Most points of a curve over k: of more numbers of responses, large ones are left out first."""


_TRAIN = "Training problems, sampled at temperature {} from the policy at the start of each iteration."
_TEST = "Test problems, at each evaluation during training and at the end."
_OVER_TRAINING: dict[str, tuple[str, ...]] = {
    "Greedy test accuracy": ("test-greedy_accuracy", "evaluation", "greedy_accuracy", "greedy accuracy", _TEST),
    "Distinct-4 on the test problems": ("test-distinct_4", "evaluation", "distinct_4", "Distinct-4 per problem", _TEST),
    "Reward over iterations": ("reward", "collection", "reward", "mean reward", _TRAIN),
    "Entropy over training": ("entropy", "train_step", "entropy", "entropy (nats)",
                              "The policy's entropy, mean over sampled response tokens."),
    "Distinct-4 over iterations": ("distinct", "collection", "distinct_4", "Distinct-4",
                                   f"Share of distinct 4-grams among a problem's responses. {_TRAIN}"),
    "KL to the reference policy": ("kl", "collection", "kl", "KL (nats)", _TRAIN),
    "Well-formed answers": ("well-formed", "collection", "well_formed", "share",
                            f"Share of responses that end by themselves with one final answer. {_TRAIN}"),
    "Exploration term": (
        "exploration", "train_step", "exploration", "value (nats)",
        "Mean of log pi_theta - log pi_old on samples of pi_old, before its weight: negative once the policy has "
        "moved away from them; a floor can lift it above zero."),
    "Floored tokens": (
        "floor", "train_step", "floor_fraction", "share of tokens",
        "Share of response tokens whose log-ratio is at the floor, where the exploration term has no gradient."),
    "Warm-up loss": ("warm-up", "sft_step", "loss", "loss (nats per token)",
                     "Supervised loss of the start that all arms share."),
}  # fmt: skip
"""Title of a chart with a line for each arm -> its key, the kind of lines in metrics.jsonl, the value in them, its name
at the axis, and the text below the chart, where {} stands for the runs' temperatures."""


def all_charts(comparison: Comparison, metrics: list[str]) -> dict[str, list]:
    """The charts of each section that have something to draw, and the titles of the ``undrawn``.

    metrics: those of the table on the first screen. Charts of what only some runs have, responses stored for
    more compute at test time, several alphas or test results during training, are not missed."""
    styles = plotting.arm_styles({START: START_LABEL} | comparison.labels)
    if comparison.replicate:
        styles[REPLICATE] = plotting.ArmStyle(
            f"{comparison.replicate}, replicate", plotting.START_COLOR, "longdash", "circle"
        )
    curves = {title: _curves_chart(comparison, styles, title, *about) for title, about in _OVER_TRAINING.items()}
    test, later = curves.pop("Greedy test accuracy"), curves.pop("Distinct-4 on the test problems")
    first = [forest_chart(comparison, styles, metrics), test or curves.pop("Reward over iterations")]
    diversity = [_matched_chart(comparison, styles), _frontier(comparison, styles), *_alpha_charts(comparison)]
    sections: dict[str, list[plotting.Chart | None]] = {"first": first, "diversity": diversity}
    sections |= {"test_time": _stored_charts(comparison, styles), "diagnostics": [*curves.values(), later]}
    drawn = {name: [one for one in found if one] for name, found in sections.items()}
    return {**drawn, "undrawn": [title for title, found in curves.items() if not found]}


# --- the first screen -------------------------------------------------------------------------------------------------


def forest_chart(comparison: Comparison, styles: plotting.Styles, metrics: list[str]) -> plotting.Chart | None:
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
    figure.add_vline(0, line={"color": plotting.START_COLOR, "width": 1})
    for index, arm in enumerate(arms):
        offset = SPREAD * ((index + 0.5) / len(arms) - 0.5)
        cells = {place: one for place, metric in enumerate(rows) if (one := comparison.difference(arm, metric))}
        texts = []
        for d in cells.values():
            apart = f"<br>noise of training ±{noise[d.metric]:.3f}" if d.metric in noise else ""
            texts.append(f"{metric_name(d.metric)} {signed(d)}{apart}<br>{direction(d)}")
        figure.add_scatter(
            x=[d.interval.mean for d in cells.values()],
            y=[place + offset for place in cells],
            error_x=_bars(list(cells.values()), thickness=1.5),
            text=texts,
            hovertemplate=f"<b>{html.escape(styles[arm].label)}</b><br>%{{text}}<extra></extra>",
            **_mark(styles[arm], 8),
        )
    figure.update_xaxes(title_text=f"difference from {html.escape(baseline)}")
    names = {"tickvals": list(range(len(rows))), "ticktext": [plain(metric) for metric in rows]}
    figure.update_yaxes(range=[len(rows) - 0.5, -0.5], showgrid=False, **names)
    caption = f"95 % intervals over {'the test problems' if comparison.is_one else 'seeds'}."
    if noise:
        caption += f" Grey: how far apart two trainings of {comparison.replicate} ended, a single measure of the noise."
    return plotting.chart("differences", f"Differences from {baseline}", caption, figure, [styles[arm] for arm in arms])


def _mark(style: plotting.ArmStyle, size: int) -> dict:
    marker = {"symbol": style.symbol, "size": size, "color": style.color}
    return {"mode": "markers", "name": html.escape(style.label), "marker": marker}


def _bars(cells: Sequence[Estimate], **options: object) -> dict:
    above = [cell.interval.high - cell.interval.mean if cell.known else None for cell in cells]
    below = [cell.interval.mean - cell.interval.low if cell.known else None for cell in cells]
    return {"array": above, "arrayminus": below, "width": 3, **options}


# --- over the training ------------------------------------------------------------------------------------------------


def _curves_chart(
    comparison: Comparison, styles: plotting.Styles, title: str, key: str, kind: str, y: str, y_title: str, caption: str
) -> plotting.Chart | None:
    trained, x_title = {arm: found for arm, found in comparison.runs.policies.items() if arm != START}, "iteration"
    if kind == "sft_step":
        x_title = "optimizer step"
        trained = {START: {record.seed: Trained(record, START) for record in comparison.runs.records}}
    lines = {}
    for arm, by_seed in trained.items():
        of_seeds = [_by_x(one, kind, y) for one in by_seed.values()]
        lines[arm] = of_seeds[0] if comparison.is_one else plotting.over_seeds([one["y"] for one in of_seeds])
    temperatures = {f"{setting(record, 'sampling.temperature'):g}": None for record in comparison.runs.records}
    band = SEEDS_BAND if not comparison.is_one else PROBLEMS_BAND if kind == "evaluation" else ""
    caption = caption.format(" or ".join(temperatures)) + band
    return plotting.line_chart(key, title, caption, lines, styles, x_title=x_title, y_title=y_title)


def _by_x(trained: Trained, kind: str, y: str) -> plotting.Line:
    """The values by iteration: the last of a collection, the mean of optimizer steps, the last of an evaluation with
    its interval, where there are evaluations during training. Those of the warm-up by the last step of a block of
    steps, as its mean."""
    lines = trained.lines(kind)
    x, last = lines["iteration"], lines.drop_duplicates("iteration", keep="last").set_index("iteration")
    if kind == "collection":
        return last[y].to_frame("y")
    if kind == "evaluation":
        metrics = {} if lines["final"].eq(True).all() else last["metrics"].to_dict()
        cells = {x: found[y] for x, found in metrics.items() if found.get(y)}
        ends = [[cell.get(end) for end in ("mean", "low", "high")] for cell in cells.values()]
        return pd.DataFrame(ends, list(cells), ["y", "low", "high"], dtype=float)
    if kind == "sft_step":
        size = max(math.ceil(len(lines) / plotting.MOST_MARKERS), 1)
        x = np.ceil(lines["step"] / size) * size
    return lines[y].groupby(x).mean().to_frame("y")


# --- diversity --------------------------------------------------------------------------------------------------------


def _matched_chart(comparison: Comparison, styles: plotting.Styles) -> plotting.Chart | None:
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
        place = {"x": [level], "y": [value.interval.mean], "hovertemplate": "matched: %{y:.4g}"}
        mark = go.Scatter(**place, **_mark(styles[arm], 13))
        marks.append(mark.update(marker_line={"width": 1.5, "color": "white"}))
    lines = {}
    for arm, by_seed in comparison.arms.items():
        curves = {y: [_by_x(one, "collection", y) for one in by_seed.values()] for y in ("accuracy", "entropy")}
        accuracy, entropy = (plotting.over_seeds([one["y"] for one in found])["y"] for found in curves.values())
        lines[arm] = pd.DataFrame({"y": entropy.to_numpy()}, accuracy)
    axes = {"x_title": "sampled training accuracy", "y_title": "entropy (nats)"}
    return plotting.line_chart(
        "matched", "Entropy against accuracy", caption, lines, styles, marks=marks, level=level, **axes
    )


def _frontier(comparison: Comparison, styles: plotting.Styles) -> plotting.Chart | None:
    metric = largest(comparison.metrics, "vote@") or "greedy_accuracy"
    pairs = {arm: (comparison.cell(arm, "distinct_4"), comparison.cell(arm, metric)) for arm in comparison.arms}
    cells = {arm: pair for arm, pair in pairs.items() if all(pair)}
    if not cells:
        return None
    means = {arm: (x.interval.mean, y.interval.mean) for arm, (x, y) in cells.items()}
    xs, ys = zip(*(means[arm] for arm in pareto_front(means)), strict=True)
    figure, dashed = go.Figure(), {"color": plotting.START_COLOR, "width": 1, "dash": "dash"}
    figure.add_scatter(x=xs, y=ys, mode="lines", line=dashed, hoverinfo="skip")
    for arm, pair in cells.items():
        bars = [_bars([cell], thickness=1, color=styles[arm].faded(0.5)) if cell.known else None for cell in pair]
        x, y = ([mean] for mean in means[arm])
        shown = {"error_x": bars[0], "error_y": bars[1], "hovertemplate": "%{x:.3f}, %{y:.3f}"}
        figure.add_scatter(x=x, y=y, **shown, **_mark(styles[arm], 11))
    figure.update_xaxes(title_text="Distinct-4")
    figure.update_yaxes(title_text=metric_name(metric))
    chance = "the test problems" if comparison.is_one else "seeds where an arm has several"
    caption = (
        f"Means with 95 % intervals over {chance}. The dashed line joins the arms that no other arm beats in both "
        "means; differences along it that are smaller than the intervals are not evidence."
    )
    key, title = f"frontier-{metric.replace('@', '-')}", f"Frontier: {metric_name(metric)} against Distinct-4"
    return plotting.chart(key, title, caption, figure, [styles[arm] for arm in cells])


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names of the points that no other beats in one coordinate without losing in the other, by rising x."""
    front = [
        name
        for name, (x, y) in points.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())
    ]
    return sorted(front, key=points.__getitem__)


def _alpha_charts(comparison: Comparison) -> list[plotting.Chart | None]:
    """The voted accuracy and Distinct-4 against alpha, a line for each family of arms that differ in alpha alone."""
    families: dict[str, dict[float, str]] = {family: {} for family in ALPHA_FAMILIES}
    for arm, by_seed in comparison.arms.items():
        settings = next(iter(by_seed.values())).settings
        for family, without in ALPHA_FAMILIES.items():  # their labels say that alpha is all that sets them apart
            if settings.alpha is not None and settings.label in (without, f"{family} α={settings.alpha:g}"):
                families[family][settings.alpha] = arm
    families = {family: dict(sorted(arms.items())) for family, arms in families.items() if len(arms) >= FEWEST_ALPHAS}
    alphas = sorted({alpha for arms in families.values() for alpha in arms})
    charts, styles = [], plotting.arm_styles({family: family for family in families})
    for metric in (largest(comparison.metrics, "vote@"), "distinct_4"):
        if metric not in comparison.metrics:
            continue
        lines = {}
        for family, arms in families.items():
            cells = [comparison.cell(arm, metric) for arm in arms.values()]
            places = [alphas.index(alpha) for alpha in arms]
            lines[family] = plotting.interval_line(places, [cell and cell.interval for cell in cells])
        caption = (
            "Final policies on the test problems, with 95 % bands. Alphas are at even distances; 0 is without "
            "exploration."
        )
        key, title = f"alpha-{metric.replace('@', '-')}", f"Sensitivity to alpha: {metric_name(metric)}"
        axes = {"x_title": "alpha", "y_title": metric_name(metric), "ticks": [f"{alpha:g}" for alpha in alphas]}
        charts.append(plotting.line_chart(key, title, caption, lines, styles, **axes))
    return charts


# --- over the number of responses k -----------------------------------------------------------------------------------


def _stored_charts(comparison: Comparison, styles: plotting.Styles) -> list[plotting.Chart | None]:
    """Votes, pass@k and best-of-k by each score over the responses that ``evaluate --stored`` looked at, against k,
    with the tokens of k responses; empty where nothing is stored."""
    evaluations = {
        arm: seeds
        for arm in comparison.labels
        if (seeds := [one.test_time for one in comparison.runs.policies[arm].values() if one.test_time])
    }
    measured = sorted({family for seeds in evaluations.values() for one in seeds for family in families(one)})
    texts = {
        "majority@{}": ("Majority vote", "Expected score of the majority answer of k responses."),
        "pass@{}": ("pass@k", "Chance that at least one of k responses is right."),
    }
    for family in measured:
        if family.startswith("best_of@") and not family.endswith("/oracle"):  # by the reward itself it is pass@k
            name = family.partition("/")[2]
            texts[family] = (f"Best of k by {name}", f"The response of k that {name} scores highest.")
    bands = PROBLEMS_BAND if comparison.is_one else SEEDS_BAND
    axes = {"x_title": "responses to each problem (k)", "y_title": "share of test problems"}
    charts = []
    for family, (title, caption) in texts.items():
        lines = {arm: _over_k(comparison, seeds, family) for arm, seeds in evaluations.items()}
        caption = f"{caption} Computed from the stored responses to the test problems.{bands}"
        key = re.sub(r"\W", "-", "samples-" + family.replace("{}", ""))
        charts.append(plotting.line_chart(key, title, caption, lines, styles, **axes))
    return charts


def _over_k(comparison: Comparison, seeds: Sequence[Evaluation], family: str) -> plotting.Line:
    curves = [{k: family.format(k) for k in thinned(sorted(families(one).get(family, ())))} for one in seeds]
    if comparison.is_one:
        resamples = setting(comparison.runs.records[0], "evaluation.bootstrap")
        pairs = {name: seeds[0].metrics[name] for name in curves[0].values()}
        intervals = ratio_intervals(pairs, resamples=resamples, seed=comparison.seeds[0])
        line = plotting.interval_line(list(curves[0]), list(intervals.values()))
    else:
        means = [{k: one.mean(name) for k, name in curve.items()} for one, curve in zip(seeds, curves, strict=True)]
        line = plotting.over_seeds([pd.Series(one, dtype=float) for one in means])
    tokens = [sum(one.mean(f"tokens@{k}") for one in seeds) / len(seeds) for k in line.index]
    return line.assign(note=[f"{mean:.0f} tokens" if math.isfinite(mean) else "" for mean in tokens])


def thinned(ks: Sequence[int]) -> list[int]:
    """At most ``MOST_POINTS`` of the rising numbers, the first and the last among them, evenly spaced on a log scale
    where there are too many."""
    if len(ks) <= MOST_POINTS:
        return list(ks)
    wanted = np.geomspace(ks[0], ks[-1], MOST_POINTS)
    return sorted({min(ks, key=lambda k, target=target: abs(k - target)) for target in wanted})
