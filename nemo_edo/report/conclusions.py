"""A comparison in words and as a plain-text table: what was measured, what the seeds show, and what limits it.

Verdicts (better, higher) are for differences that several seeds show, corrected for their number. One seed has values
and differences only, next to the distance between two trainings of the baseline.
"""

from __future__ import annotations

import json
import textwrap
from itertools import zip_longest

from nemo_edo.evaluation.results import POOLED, START, largest, main_metrics, metric_name
from nemo_edo.metrics.intervals import Interval
from nemo_edo.report.comparison import LEVEL, Comparison, Difference, Estimate, Replicate
from nemo_edo.report.run_set import arm_settings

MALFORMED_BELOW = 0.5
"""An arm with a smaller share of well-formed answers has broken down; its entropy and diversity are not a merit."""
MOST_NAMED = 3
"""Differences that the first sentence names."""
LABEL_WIDTH, CELL_WIDTH = 20, 10
"""Six cells and a label fit into the 80 columns of a terminal; a longer label takes several lines."""
_SHORT_NAMES = {"greedy_accuracy": "greedy", "accuracy": "sampled", "distinct_4": "dist-4", "entropy": "entropy"}


def conclusions(comparison: Comparison) -> list[str]:
    """What the runs show and do not show, one paragraph per string: the result in one sentence first."""
    return [
        _result(comparison),
        *_left_out(comparison),
        *_one_seed(comparison),
        *_breakdowns(comparison),
        *_by_arm(comparison),
        *_exploration(comparison),
        *_alpha(comparison),
        *_matched(comparison),
        _scope(comparison),
    ]


def count(number: int, noun: str) -> str:
    """``1 run``, ``3 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def direction(difference: Difference) -> str:
    """The difference in one or two words; accuracies are better or worse, diversity is only higher or lower."""
    if not difference.shown:
        return "no difference shown" if len(difference.by_seed) > 1 else "one seed"
    is_accuracy = "@" in difference.metric or "accuracy" in difference.metric
    above, below = ("better", "worse") if is_accuracy else ("higher", "lower")
    return above if difference.interval.mean > 0 else below


def _result(comparison: Comparison) -> str:
    """The result in one sentence, or two."""
    if not comparison.differences:
        means = [
            f"{_word(metric)} {cell.interval.mean:.3f}"
            for metric in main_metrics(comparison.metrics)
            if (cell := list(comparison.table.values())[-1][metric])
        ]
        missing = "second arm to compare with" if len(comparison.labels) == 1 else "common metric with a baseline arm"
        return f"{list(comparison.labels.values())[-1]}: {', '.join(means)}. There is no {missing}."
    baseline, tested = comparison.labels[comparison.baseline], _tested(comparison)
    if not tested:
        return _result_of_one_seed(comparison, baseline)
    seeds = count(max(len(difference.by_seed) for difference in tested), "seed")
    shown = [f"{comparison.labels[d.arm]}: {_in_words(d)}" for d in tested if d.shown]
    method = f"t tests over seeds, Holm's correction, level {LEVEL:g}"
    if not shown:
        return f"Over {seeds}, none of the {count(len(tested), 'difference')} from {baseline} is shown ({method})."
    verb = "is" if len(shown) == 1 else "are"
    many = f"{len(shown)} of {len(tested)} differences from {baseline} {verb} shown ({method})"
    rest = [f"and {len(shown) - MOST_NAMED} more"] if len(shown) > MOST_NAMED else []
    return f"Over {seeds}, {many}: {'; '.join(shown[:MOST_NAMED] + rest)}."


def _result_of_one_seed(comparison: Comparison, baseline: str) -> str:
    metrics = [difference.metric for difference in comparison.differences]
    metric = largest(metrics, "vote@") or metrics[0]
    gaps = sorted(d.interval.mean for d in comparison.differences if d.metric == metric)
    span = f"{gaps[0]:+.3f}" if len(gaps) == 1 else f"{gaps[0]:+.3f} to {gaps[-1]:+.3f}"
    who = comparison.labels[comparison.differences[0].arm] if len(gaps) == 1 else f"{len(gaps)} arms"
    replicate = comparison.replicate
    noise = (
        f"{replicate.label}, trained again with other samples, differs from itself by {replicate.noise[metric]:.3f}"
        if replicate and metric in replicate.noise
        else "how much a second training would differ was not measured (replicate_baseline=true measures it)"
    )
    where = f"one seed ({comparison.seeds[0]})" if comparison.is_one else "one seed of each arm"
    verb = "differs" if len(gaps) == 1 else "differ"
    return f"On {where}, {who} {verb} from {baseline} in {_word(metric)} by {span}; {noise}. One seed gives no verdict."


def _scope(comparison: Comparison) -> str:
    if comparison.is_one:
        return (
            f"This is one seed ({comparison.seeds[0]}) on {comparison.problems} test problems. The 95 % intervals "
            "cover the choice of test problems only, not the noise of training. A claim about an arm needs several "
            "seeds."
        )
    seeds = ", ".join(map(str, comparison.seeds))
    return (
        f"{count(len(comparison.runs.records), 'run')} with {count(len(comparison.seeds), 'seed')} ({seeds}) and "
        f"{count(len(comparison.arms), 'trained arm')}, on {comparison.problems} test problems. Intervals over seeds "
        "are Student's t: with few seeds they are wide, but they cover the noise of training. Intervals over problems "
        "cover the choice of test problems only."
    )


def _left_out(comparison: Comparison) -> list[str]:
    named = "; ".join(f"{folder}: {reason}" for folder, reason in comparison.runs.left_out.items())
    return [f"Left out, because incomplete: {named}."] if named else []


def _one_seed(comparison: Comparison) -> list[str]:
    single = [comparison.labels[arm] for arm, by_seed in comparison.arms.items() if len(by_seed) == 1]
    if comparison.is_one or not single:
        return []
    has = "has" if len(single) == 1 else "have"
    which = "Every arm has" if len(single) == len(comparison.arms) else f"{' and '.join(single)} {has}"
    return [f"{which} one seed only, so nothing is claimed there: a difference may be the noise of training."]


def _breakdowns(comparison: Comparison) -> list[str]:
    """Arms whose answers lost their form; one whose start had none has not broken down."""
    start = comparison.table.get(START, {}).get("well_formed")
    if start and start.interval.mean < MALFORMED_BELOW:
        return []
    cells = {arm: comparison.table[arm].get("well_formed") for arm in comparison.arms}
    return [
        f"{comparison.labels[arm]} broke down: only {cell.interval.mean:.0%} of its answers are well-formed. Read its "
        "entropy and diversity as noise, not as exploration."
        for arm, cell in cells.items()
        if cell and cell.interval.mean < MALFORMED_BELOW
    ]


def _by_arm(comparison: Comparison) -> list[str]:
    paragraphs = []
    for arm in comparison.arms:
        found = [difference for difference in _tested(comparison) if difference.arm == arm]
        if not found:
            continue
        shown = [_in_words(difference) for difference in found if difference.shown]
        unclear = [f"{_word(d.metric)} ({d.interval.mean:+.3f})" for d in found if not d.shown]
        rest = f"no difference shown in {', '.join(unclear)}" if unclear else ""
        paragraphs.append(f"{_against(comparison, found[0])}: {'; '.join(filter(None, [', '.join(shown), rest]))}.")
    return paragraphs


def _exploration(comparison: Comparison) -> list[str]:
    """Whether exploration paid off at test time, with the baselines that do not explore named alongside."""
    if comparison.baseline in (None, START):
        return []
    baseline = comparison.labels[comparison.baseline]
    metrics = [metric for family in ("vote@", "pass@") if (metric := largest(comparison.metrics, family))]
    paragraphs = []
    for arm in comparison.arms:
        found = [d for d in _tested(comparison) if d.arm == arm and d.metric in metrics]
        if not _explores(comparison, arm) or not found:
            continue
        label, gains = comparison.labels[arm], [d.metric for d in found if direction(d) == "better"]
        if gains:
            where = f"over {count(len(found[0].by_seed), 'seed')}"
            names = " and ".join(metric_name(metric) for metric in gains)
            plainer = _without_exploration(comparison, gains)
            paragraphs.append(f"{label} exceeds {baseline} in {names} {where}. {plainer}")
        else:
            names = " or ".join(metric_name(d.metric) for d in found)
            paragraphs.append(f"{label} shows no gain over {baseline} in {names}.")
    return paragraphs


def _without_exploration(comparison: Comparison, metrics: list[str]) -> str:
    """What the arms that neither explore nor are the baseline reach."""
    found = [
        f"{comparison.labels[arm]} {_signed(difference)} in {metric_name(metric)}"
        for arm in comparison.arms
        if not _explores(comparison, arm) and arm != comparison.baseline
        for metric in metrics
        if (difference := comparison.difference(arm, metric))
    ]
    if not found:
        return "No other arm without exploration was run, so it is open whether a plainer method does as well."
    return f"The other arms without exploration, for comparison: {', '.join(found)}."


def _explores(comparison: Comparison, arm: str) -> bool:
    return next(iter(comparison.arms[arm].values())).settings.exploration_weight != 0


def _alpha(comparison: Comparison) -> list[str]:
    """For arms that differ only in alpha: whether several seeds show a difference from alpha = 0."""
    paragraphs = []
    for family in _alpha_families(comparison) if _tested(comparison) else []:
        base = next((arm for alpha, arm in family if alpha == 0), None)
        others = {arm: alpha for alpha, arm in family if alpha}
        if base is None or base != comparison.baseline or not others:
            continue
        found = [d for d in _tested(comparison) if d.arm in others]
        if not found:
            continue
        exceeding = [d for d in found if d.shown]
        values = ", ".join(f"{alpha:g}" for alpha in others.values())
        if exceeding:
            names = "; ".join(f"{comparison.labels[d.arm]}: {_in_words(d)}" for d in exceeding)
            outcome = f"{len(exceeding)} of {len(found)} differences are shown ({names})"
        else:
            metrics = ", ".join(dict.fromkeys(_word(d.metric) for d in found))
            outcome = f"no difference is shown in {metrics}"
        paragraphs.append(f"Alpha {values} against 0: {outcome}.")
    return paragraphs


def _alpha_families(comparison: Comparison) -> list[list[tuple[float, str]]]:
    """(alpha, arm) of the arms that share every setting but the strength of exploration, by rising alpha."""
    families: dict[str, list[tuple[float, str]]] = {}
    for arm, by_seed in comparison.arms.items():
        trained = next(iter(by_seed.values()))
        if trained.settings.alpha is None:
            continue
        settings = arm_settings(trained.record, trained.name)
        rest = {key: value for key, value in settings.items() if key not in ("alpha", "exploration_coefficient")}
        families.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append((trained.settings.alpha, arm))
    return [sorted(family) for family in families.values() if len(family) > 1]


def _matched(comparison: Comparison) -> list[str]:
    matched = comparison.matched
    if len(comparison.arms) < 2:
        return []
    left_out = []
    for arm, reasons in matched.left_out.items():
        seeds = "" if comparison.is_one else f" in {count(len(reasons), 'seed')}"
        reason = next(iter(reasons.values()))
        left_out.append(f"{comparison.labels[arm]} is left out of the matched comparison{seeds}: {reason}.")
    if not matched.accuracies:
        return ["No comparison at matched accuracy is possible.", *left_out]
    levels = ", ".join(
        f"{accuracy:.3f}" if comparison.is_one else f"{accuracy:.3f} (seed {seed})"
        for seed, accuracy in matched.accuracies.items()
    )
    measures = [measure for measure, by_arm in matched.values.items() if by_arm]
    readings = [f"{_word(measure)}: {_readings(comparison, measure)}." for measure in measures]
    caution = " The values are of one run each and carry no interval: small differences between them are no evidence."
    paragraph = (
        f"At matched accuracy on the training problems, around {levels} (the middle of a range that the compared arms "
        f"all passed): {' '.join(readings) or 'nothing was measured.'} Arms learn at different speeds, so this is the "
        f"fairer view of diversity.{caution if comparison.is_one else ''}"
    )
    return [paragraph, *left_out]


def _readings(comparison: Comparison, measure: str) -> str:
    """Each arm's matched value, with its difference from the baseline there."""
    matched, readings = comparison.matched, []
    for arm in comparison.arms:
        value, apart = matched.values[measure].get(arm), matched.differences[measure].get(arm)
        if value is not None:
            distance = f" ({_signed(apart)})" if apart else ""
            readings.append(f"{comparison.labels[arm]} {value.interval.mean:.3f}{distance}")
        elif len(matched.left_out.get(arm, ())) < len(comparison.seeds):
            readings.append(f"{comparison.labels[arm]} not measured")
    return "; ".join(readings)


def _tested(comparison: Comparison) -> list[Difference]:
    """The differences over several seeds."""
    return [difference for difference in comparison.differences if len(difference.by_seed) > 1]


def _against(comparison: Comparison, difference: Difference) -> str:
    seeds = count(len(difference.by_seed), "seed")
    return f"{comparison.labels[difference.arm]} against {comparison.labels[comparison.baseline]}, {seeds}"


def _in_words(difference: Difference) -> str:
    return f"{direction(difference)} {_word(difference.metric)} ({signed(difference.interval)})"


def _signed(estimate: Estimate) -> str:
    return signed(estimate.interval) if estimate.known else f"{estimate.interval.mean:+.3f}"


def _word(metric: str) -> str:
    return metric_name(metric).removesuffix(" (nats)")


def short_name(metric: str) -> str:
    """The metric as the head of a narrow column."""
    return _SHORT_NAMES.get(metric, metric_name(metric))


def terminal_table(comparison: Comparison) -> str:
    """The main metrics in 80 columns: a line of means for each arm, and its 95 % intervals under it. Labels are whole.

    A star marks a mean whose difference from the baseline several seeds show.
    """
    metrics = [metric for metric in main_metrics(comparison.metrics) if metric != POOLED]
    lines = [_line("arm", [short_name(metric) for metric in metrics]), "-" * (LABEL_WIDTH + CELL_WIDTH * len(metrics))]
    for arm, label in comparison.labels.items():
        cells = [comparison.table[arm][metric] for metric in metrics]
        found = [comparison.difference(arm, metric) for metric in metrics]
        stars = ["*" if difference and difference.shown else " " for difference in found]
        means = ["-" if c is None else f"{c.interval.mean:.3f}{star}" for c, star in zip(cells, stars, strict=True)]
        bounds = [f"{_short(c.interval.low)}-{_short(c.interval.high)}" if c and c.known else "" for c in cells]
        parts = textwrap.wrap(label, LABEL_WIDTH - 1)
        lines += [_line(*row) for row in zip_longest(parts, [means, bounds], fillvalue="")]
    seeds = f"one seed ({comparison.seeds[0]})" if comparison.is_one else count(len(comparison.seeds), "seed")
    over = "" if comparison.is_one else "seeds; "
    lines.append(f"95 % intervals over {over}{comparison.problems} problems, {seeds}.")
    if any(difference.shown for difference in comparison.differences):
        baseline = comparison.labels[comparison.baseline]
        lines += textwrap.wrap(f"* differs from {baseline} (t test over seeds, Holm's correction).", 80)
    if comparison.replicate:
        apart = [_noise(comparison.replicate, metric) for metric in metrics]
        lines.insert(-1, _line("noise of training", apart))
    return "\n".join(lines)


def _noise(replicate: Replicate, metric: str) -> str:
    return f"±{replicate.noise[metric]:.3f} " if metric in replicate.noise else ""


def _line(label: str, cells: list[str]) -> str:
    return (f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)).rstrip()


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2f}"
