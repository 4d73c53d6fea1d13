"""Sensitivity to alpha: what arms that differ in alpha alone end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_edo.evaluation.comparison import ArmSettings, largest, metric_name
from nemo_edo.evaluation.drawing import Chart, arm_styles, interval_series, line_chart
from nemo_edo.metrics.intervals import Interval

FEWEST = 3
"""Alphas of a family, below which there is no curve."""
FAMILIES = {"ED-GRPO": "GRPO", "ED-iDPO": "ETO"}
"""What alpha is swept of -> the label of the same arm without exploration."""
Points = dict[str, dict[float, Mapping[str, Interval | None]]]
"""family -> alpha -> metric -> interval."""


def alpha_points(arms: Mapping[str, ArmSettings], table: Mapping[str, Mapping[str, Interval | None]]) -> Points:
    """Of arms whose labels say that alpha is all that sets them apart, by family; those with ``FEWEST`` alphas."""
    found: Points = {family: {} for family in FAMILIES}
    for arm, settings in arms.items():
        for family, plain in FAMILIES.items():
            if settings.alpha is not None and settings.label in (plain, f"{family} α={settings.alpha:g}"):
                found[family][settings.alpha] = table[arm]
    return {family: points for family, points in found.items() if len(points) >= FEWEST}


def alpha_charts(points: Points, metrics: Sequence[str]) -> list[Chart]:
    """The voted accuracy and Distinct-4 against alpha, a line for each family. Alphas stand at even distances."""
    alphas = sorted({alpha for of_family in points.values() for alpha in of_family})
    styles = arm_styles({family: family for family in points})
    charts = []
    for metric in (largest(metrics, "vote@"), "distinct_4"):
        series = {
            family: interval_series(
                [float(alphas.index(alpha)) for alpha in sorted(of_family)],
                [of_family[alpha].get(metric) for alpha in sorted(of_family)],
            )
            for family, of_family in points.items()
        }
        title = f"Sensitivity to alpha: {metric_name(metric or '')}"
        chart = line_chart(
            f"alpha-{(metric or '').replace('@', '-')}",
            title,
            "Final policies on the test problems, with 95 % bands. Alphas stand at even distances; 0 is without "
            "exploration.",
            series,
            styles,
            x_title="alpha",
            y_title=metric_name(metric or ""),
            ticks=[f"{alpha:g}" for alpha in alphas],
        )
        charts += [chart] if chart else []
    return charts
