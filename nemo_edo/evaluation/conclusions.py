"""A comparison in words and as a plain-text table: what exceeds its interval, what does not, and what that can mean.

The sentences claim no advantage where an interval includes zero, and say "worse" where something is worse.
"""

from __future__ import annotations

import math

from nemo_edo.evaluation.comparison import (
    START,
    Comparison,
    Difference,
    largest,
    main_metrics,
    metric_name,
)
from nemo_edo.metrics.intervals import Interval

MALFORMED_BELOW = 0.5
"""An arm with a smaller share of well-formed answers has broken down; its entropy and diversity are no merit."""
LABEL_WIDTH, CELL_WIDTH = 22, 11
"""Seven cells beside a label fit into 100 columns."""
_SHORT_NAMES = {"greedy_accuracy": "greedy", "accuracy": "sampled", "entropy": "entropy", "well_formed": "wellformed"}


def conclusions(comparison: Comparison) -> list[str]:
    """What the run shows and does not show, one paragraph a string, the scope first."""
    return [
        _scope(comparison),
        *_breakdowns(comparison),
        *_by_arm(comparison),
        *_exploration(comparison),
        *_matched(comparison),
        *_multiplicity(comparison),
    ]


def signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def direction(difference: Difference) -> str:
    """The difference in one or two words; accuracies are better or worse, diversity is only higher or lower."""
    if not difference.exceeds_interval:
        return "no difference shown"
    judged = "@" in difference.metric or "accuracy" in difference.metric
    above, below = ("better", "worse") if judged else ("higher", "lower")
    return above if difference.interval.low > 0 else below


def _scope(comparison: Comparison) -> str:
    return (
        f"This is one seed ({comparison.seed}) on {comparison.problems} test problems. The 95 % intervals cover "
        "the choice of test problems only, not the luck of training: the same arm trained with another seed may "
        "differ by more than its interval. A claim about an arm needs several seeds."
    )


def _breakdowns(comparison: Comparison) -> list[str]:
    shares = {arm: row.get("well_formed") for arm, row in comparison.table.items() if arm != START}
    return [
        f"{comparison.labels[arm]} broke down: only {share.mean:.0%} of its answers are well-formed. Read its "
        "entropy and diversity as noise, not as exploration."
        for arm, share in shares.items()
        if share is not None and share.mean < MALFORMED_BELOW
    ]


def _by_arm(comparison: Comparison) -> list[str]:
    paragraphs = []
    for arm in comparison.arms:
        found = [difference for difference in comparison.differences if difference.arm == arm]
        if not found:
            continue
        words = [f"{direction(d)} {_word(d.metric)} ({d.interval.mean:+.3f})" for d in found if d.exceeds_interval]
        unclear = [f"{_word(d.metric)} ({d.interval.mean:+.3f})" for d in found if not d.exceeds_interval]
        start = f"{comparison.labels[arm]} against {comparison.labels[comparison.baseline]}: "
        shown = ", ".join(words) if words else "nothing differs by more than its interval"
        rest = f"; no difference shown in {', '.join(unclear)}" if unclear else ""
        paragraphs.append(f"{start}{shown}{rest}.")
    return paragraphs


def _exploration(comparison: Comparison) -> list[str]:
    """Whether exploring paid at test time, with the rivals that do not explore named beside it."""
    baseline = comparison.baseline
    if baseline in (None, START):
        return []
    metrics = [metric for family in ("vote@", "pass@") if (metric := largest(comparison.metrics, family))]
    paragraphs = []
    for arm, settings in comparison.arms.items():
        found = [d for metric in metrics if (d := comparison.difference(arm, metric))]
        if settings.exploration_weight == 0 or not found:
            continue
        gains = [metric_name(d.metric) for d in found if direction(d) == "better"]
        if not gains:
            names = " or ".join(metric_name(d.metric) for d in found)
            paragraphs.append(
                f"No advantage of exploration is shown by {settings.label}: in {names} it does not "
                f"exceed {comparison.labels[baseline]} by more than the interval."
            )
            continue
        paragraphs.append(
            f"{settings.label} exceeds {comparison.labels[baseline]} in {' and '.join(gains)} on this "
            f"seed. {_rivals(comparison, [d.metric for d in found if direction(d) == 'better'])}"
        )
    return paragraphs


def _rivals(comparison: Comparison, metrics: list[str]) -> str:
    rivals = [
        arm
        for arm, settings in comparison.arms.items()
        if settings.exploration_weight == 0 and arm != comparison.baseline
    ]
    found = [
        f"{comparison.labels[arm]} {signed(d.interval)} in {metric_name(metric)}"
        for arm in rivals
        for metric in metrics
        if (d := comparison.difference(arm, metric))
    ]
    if not found:
        return "No rival without exploration was run, so it is open whether a plainer method does as well."
    return f"The rivals without exploration, for comparison: {', '.join(found)}."


def _matched(comparison: Comparison) -> list[str]:
    matched = comparison.matched
    if len(comparison.arms) < 2:
        return []
    left_out = [
        f"{comparison.labels[arm]} is left out of the matched comparison: {reason}."
        for arm, reason in matched.reasons.items()
    ]
    if matched.accuracy is None:
        return ["No comparison at matched accuracy is possible.", *left_out]
    readings = [
        f"{_word(measure)}: {_readings(comparison, measure)}."
        for measure, values in matched.values.items()
        if not all(math.isnan(value) for value in values.values())
    ]
    paragraph = (
        f"At matched accuracy, {matched.accuracy:.3f} on the training problems (the highest level that the "
        f"compared arms all reached): {' '.join(readings) or 'nothing was measured.'} Arms learn at different "
        "speeds, so this is the fairer view of diversity. The values are interpolated points of one run each "
        "and carry no interval: small differences between them are no evidence."
    )
    return [paragraph, *left_out]


def _readings(comparison: Comparison, measure: str) -> str:
    """Each arm's matched value, with its distance from the baseline there."""
    values, readings = comparison.matched.values[measure], []
    for arm, value in values.items():
        apart = value - values.get(comparison.baseline, math.nan)
        distance = "" if arm == comparison.baseline or math.isnan(apart) else f" ({apart:+.3f})"
        number = "not measured" if math.isnan(value) else f"{value:.3f}{distance}"
        readings.append(f"{comparison.labels[arm]} {number}")
    return "; ".join(readings)


def _word(metric: str) -> str:
    return metric_name(metric).removesuffix(" (nats)")


def _multiplicity(comparison: Comparison) -> list[str]:
    count = len(comparison.differences)
    if not count:
        missing = "second arm to compare with" if len(comparison.arms) == 1 else "common metric with a baseline arm"
        return [f"There is no {missing}, so nothing is said about differences."]
    exceeding = sum(difference.exceeds_interval for difference in comparison.differences)
    return [
        (
            f"{count} differences were tested against {comparison.labels[comparison.baseline]}, and {exceeding} "
            f"exceed their interval; with no difference at all about {0.05 * count:.1f} of {count} would be expected "
            "to. The intervals are not corrected for this."
        )
    ]


def terminal_table(comparison: Comparison) -> str:
    """The main metrics in at most 100 columns: a line of means for each arm, and its 95 % intervals under it.

    A star marks a mean whose paired difference from the baseline exceeds its interval.
    """
    metrics = [*main_metrics(comparison.metrics), *(m for m in comparison.metrics if m == "well_formed")]
    names = [_SHORT_NAMES.get(metric, metric_name(metric)) for metric in metrics]
    lines = [_line("arm", names), "-" * (LABEL_WIDTH + CELL_WIDTH * len(metrics))]
    for arm, label in comparison.labels.items():
        cells = [comparison.table[arm][metric] for metric in metrics]
        stars = [(d := comparison.difference(arm, metric)) is not None and d.exceeds_interval for metric in metrics]
        lines.append(
            _line(
                label,
                [
                    "-" if cell is None else f"{cell.mean:.3f}{'*' if star else ' '}"
                    for cell, star in zip(cells, stars, strict=True)
                ],
            )
        )
        lines.append(_line("", ["" if cell is None else f"{_short(cell.low)}-{_short(cell.high)}" for cell in cells]))
    lines.append(f"95 % intervals over {comparison.problems} problems, one seed ({comparison.seed}).")
    if comparison.differences:
        lines.append(
            f"* differs from {_cut(comparison.labels[comparison.baseline], 40)} by more than the paired interval."
        )
    return "\n".join(lines)


def _line(label: str, cells: list[str]) -> str:
    return (f"{_cut(label, LABEL_WIDTH - 1):<{LABEL_WIDTH}}" + "".join(f"{c:>{CELL_WIDTH}}" for c in cells)).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2f}"
