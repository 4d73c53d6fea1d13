"""Sensitivity to alpha: final results against alpha, where arms differ in it alone."""

from __future__ import annotations

from nemo_edo.evaluation.results import largest, metric_name
from nemo_edo.report.comparison import Comparison
from nemo_edo.report.plotting import Chart, arm_styles, interval_series, line_chart

FEWEST_ALPHAS = 3
"""The fewest alphas of a family that make a curve."""
ALPHA_FAMILIES = {"ED-GRPO": "GRPO", "ED-iDPO": "ETO"}
"""Family of arms that differ in alpha -> the label of the same arm without exploration."""


def alpha_charts(comparison: Comparison) -> list[Chart]:
    """The voted accuracy and Distinct-4 against alpha, a line for each family of arms that differ in alpha alone."""
    families = _alpha_families(comparison)
    alphas = sorted({alpha for arms in families.values() for alpha in arms})
    charts = []
    for metric in (largest(comparison.metrics, "vote@"), "distinct_4"):
        if metric not in comparison.metrics:
            continue
        series = {
            family: interval_series(
                [float(alphas.index(alpha)) for alpha in sorted(arms)],
                [(cell := comparison.table[arms[alpha]][metric]) and cell.interval for alpha in sorted(arms)],
            )
            for family, arms in families.items()
        }
        chart = line_chart(
            f"alpha-{metric.replace('@', '-')}",
            f"Sensitivity to alpha: {metric_name(metric)}",
            "Final policies on the test problems, with 95 % bands. Alphas are at even distances; 0 is without "
            "exploration.",
            series,
            arm_styles({family: family for family in families}),
            x_title="alpha",
            y_title=metric_name(metric),
            ticks=[f"{alpha:g}" for alpha in alphas],
        )
        charts += [chart] if chart else []
    return charts


def _alpha_families(comparison: Comparison) -> dict[str, dict[float, str]]:
    """family -> alpha -> arm, of the arms whose labels say that alpha is all that sets them apart."""
    found: dict[str, dict[float, str]] = {family: {} for family in ALPHA_FAMILIES}
    for arm, by_seed in comparison.arms.items():
        settings = next(iter(by_seed.values())).settings
        for family, plain in ALPHA_FAMILIES.items():
            if settings.alpha is not None and settings.label in (plain, f"{family} α={settings.alpha:g}"):
                found[family][settings.alpha] = arm
    return {family: arms for family, arms in found.items() if len(arms) >= FEWEST_ALPHAS}
