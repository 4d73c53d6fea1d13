"""A comparison in words and as a plain-text table: what was measured, what the seeds show, and what limits it.

Verdicts (better, higher) are for differences that several seeds show, corrected for their number. One seed has values
and differences only, next to the distance between two trainings of the baseline.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from nemo_edo.evaluation.results import POOLED, START, largest, main_metrics, metric_name
from nemo_edo.report.comparison import LEVEL, Comparison, Difference, Estimate
from nemo_edo.report.run_set import arm_settings

MALFORMED_BELOW = 0.5
"""An arm with a smaller share of well-formed answers has broken down; its entropy and diversity are not a merit."""
MOST_NAMED = 3
"""Differences that the first sentence names."""
WIDTH, LABEL_WIDTH = 80, 19
"""Columns of a terminal, and those of a label: a longer one takes several lines."""
METHOD = f"t tests over seeds, Holm's correction, level {LEVEL:g}"
_SHORT_NAMES = {"greedy_accuracy": "greedy", "accuracy": "sampled", "distinct_4": "dist-4", "entropy": "entropy"}


def conclusions(comparison: Comparison) -> list[str]:
    """What the runs show and do not show, one paragraph per string: the result in one sentence first."""
    return [
        _result(comparison),
        *_limits(comparison),
        *_by_arm(comparison),
        *_exploration(comparison),
        *_alpha(comparison),
        *_matched(comparison),
        _scope(comparison),
    ]


# --- words ------------------------------------------------------------------------------------------------------------


def count(number: int, noun: str) -> str:
    """``1 run``, ``3 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def signed(cell: Estimate) -> str:
    """``+0.054 [+0.052, +0.057]``, without an interval where it has none."""
    ends = f" [{cell.interval.low:+.3f}, {cell.interval.high:+.3f}]" if cell.known else ""
    return f"{cell.interval.mean:+.3f}{ends}"


def direction(difference: Difference) -> str:
    """The difference in one or two words; accuracies are better or worse, diversity is only higher or lower."""
    if not difference.shown:
        return "no difference shown" if len(difference.by_seed) > 1 else "one seed"
    is_accuracy = "@" in difference.metric or "accuracy" in difference.metric
    above, below = ("better", "worse") if is_accuracy else ("higher", "lower")
    return above if difference.interval.mean > 0 else below


def plain(metric: str) -> str:
    """The metric's name without its unit."""
    return metric_name(metric).removesuffix(" (nats)")


def short_name(metric: str) -> str:
    """The metric as the head of a narrow column."""
    return _SHORT_NAMES.get(metric, metric_name(metric))


def _in_words(difference: Difference) -> str:
    return f"{direction(difference)} {plain(difference.metric)} ({signed(difference)})"


def _outcome(differences: Sequence[Difference]) -> str:
    """What seeds show of an arm's differences, and in which metrics they show nothing."""
    unclear = [f"{plain(d.metric)} ({d.interval.mean:+.3f})" for d in differences if not d.shown]
    shown = ", ".join(_in_words(d) for d in differences if d.shown)
    return "; ".join(filter(None, [shown, unclear and f"no difference shown in {', '.join(unclear)}"]))


def _tested(comparison: Comparison, arm: str | None = None) -> list[Difference]:
    """The differences over several seeds, of one arm or of all."""
    return [d for d in comparison.differences if len(d.by_seed) > 1 and arm in (None, d.arm)]


# --- paragraphs -------------------------------------------------------------------------------------------------------


def _result(comparison: Comparison) -> str:
    """The result in one sentence, or two."""
    labels, tested = comparison.labels, _tested(comparison)
    if not comparison.differences:
        last = list(labels)[-1]
        found = [(metric, comparison.cell(last, metric)) for metric in main_metrics(comparison.metrics)]
        means = ", ".join(f"{plain(metric)} {cell.interval.mean:.3f}" for metric, cell in found if cell)
        missing = "second arm to compare with" if len(labels) == 1 else "common metric with a baseline arm"
        return f"{labels[last]}: {means}. There is no {missing}."
    if not tested:
        return _result_of_one_seed(comparison)
    over = f"Over {count(max(len(d.by_seed) for d in tested), 'seed')}"
    shown = [f"{labels[d.arm]}: {_in_words(d)}" for d in tested if d.shown]
    those = f"{count(len(tested), 'difference')} from {labels[comparison.baseline]}"
    if not shown:
        return f"{over}, none of the {those} is shown ({METHOD})."
    more = [f"and {len(shown) - MOST_NAMED} more"] if len(shown) > MOST_NAMED else []
    verb = "is" if len(shown) == 1 else "are"
    return f"{over}, {len(shown)} of {those} {verb} shown ({METHOD}): {'; '.join(shown[:MOST_NAMED] + more)}."


def _result_of_one_seed(comparison: Comparison) -> str:
    metrics = [difference.metric for difference in comparison.differences]
    metric = largest(metrics, "vote@") or metrics[0]
    gaps = sorted((d for d in comparison.differences if d.metric == metric), key=lambda d: d.interval.mean)
    span = " to ".join(dict.fromkeys(f"{d.interval.mean:+.3f}" for d in (gaps[0], gaps[-1])))
    who = f"{comparison.labels[gaps[0].arm]} differs" if len(gaps) == 1 else f"{len(gaps)} arms differ"
    noise = "how much a second training would differ was not measured (replicate_baseline=true measures it)"
    if metric in comparison.noise:
        apart = f"{comparison.noise[metric]:.3f}"
        noise = f"{comparison.replicate}, trained again with other samples, differs from itself by {apart}"
    where = f"one seed ({comparison.seeds[0]})" if comparison.is_one else "one seed of each arm"
    against = f"{comparison.labels[comparison.baseline]} in {plain(metric)} by {span}"
    return f"On {where}, {who} from {against}; {noise}. One seed gives no verdict."


def _limits(comparison: Comparison) -> list[str]:
    """Runs that were left out, arms with one seed, and arms whose answers lost their form."""
    said, labels = [], comparison.labels
    if comparison.runs.left_out:
        named = "; ".join(f"{folder}: {reason}" for folder, reason in comparison.runs.left_out.items())
        said.append(f"Left out, because incomplete: {named}.")
    single = [labels[arm] for arm, by_seed in comparison.arms.items() if len(by_seed) == 1]
    if single and not comparison.is_one:
        has = "has" if len(single) == 1 else "have"
        which = "Every arm has" if len(single) == len(comparison.arms) else f"{' and '.join(single)} {has}"
        said.append(f"{which} one seed only, so nothing is claimed there: a difference may be the noise of training.")
    shares = {
        name: cells["well_formed"].interval.mean for name, cells in comparison.table.items() if "well_formed" in cells
    }
    if shares.get(START, 1.0) >= MALFORMED_BELOW:  # otherwise an arm as bad has not broken down
        said += [
            f"{labels[arm]} broke down: only {shares[arm]:.0%} of its answers are well-formed. Read its entropy and "
            "diversity as noise, not as exploration."
            for arm in comparison.arms
            if shares.get(arm, 1.0) < MALFORMED_BELOW
        ]
    return said


def _scope(comparison: Comparison) -> str:
    problems, seeds = f"{comparison.problems} test problems", ", ".join(map(str, comparison.seeds))
    if comparison.is_one:
        return (
            f"This is one seed ({seeds}) on {problems}. The 95 % intervals cover the choice of test problems only, not "
            "the noise of training. A claim about an arm needs several seeds."
        )
    return (
        f"{count(len(comparison.runs.records), 'run')} with {count(len(comparison.seeds), 'seed')} ({seeds}) and "
        f"{count(len(comparison.arms), 'trained arm')}, on {problems}. Intervals over seeds are Student's t: with few "
        "seeds they are wide, but they cover the noise of training. Intervals over problems cover the choice of test "
        "problems only."
    )


def _by_arm(comparison: Comparison) -> list[str]:
    tested = {arm: found for arm in comparison.arms if (found := _tested(comparison, arm))}
    return [
        f"{comparison.labels[arm]} against {comparison.labels[comparison.baseline]}, "
        f"{count(len(found[0].by_seed), 'seed')}: {_outcome(found)}."
        for arm, found in tested.items()
    ]


def _exploration(comparison: Comparison) -> list[str]:
    """Whether exploration paid off at test time, with the baselines that do not explore named alongside."""
    if comparison.baseline in (None, START):
        return []
    labels, said = comparison.labels, []
    explores = {
        arm: next(iter(by_seed.values())).settings.exploration_weight != 0 for arm, by_seed in comparison.arms.items()
    }
    metrics = [metric for family in ("vote@", "pass@") if (metric := largest(comparison.metrics, family))]
    for arm in (arm for arm in comparison.arms if explores[arm]):
        found = [d for d in _tested(comparison, arm) if d.metric in metrics]
        gains = [d for d in found if direction(d) == "better"]
        names = [metric_name(d.metric) for d in gains or found]
        if gains:
            plainer = [
                f"{labels[other]} {signed(difference)} in {metric_name(d.metric)}"
                for other in comparison.arms
                for d in gains
                if not explores[other] and (difference := comparison.difference(other, d.metric))
            ]
            others = (
                f"The other arms without exploration, for comparison: {', '.join(plainer)}."
                if plainer
                else "No other arm without exploration was run, so it is open whether a plainer method does as well."
            )
            over = f"over {count(len(found[0].by_seed), 'seed')}"
            said.append(
                f"{labels[arm]} exceeds {labels[comparison.baseline]} in {' and '.join(names)} {over}. {others}"
            )
        elif found:
            said.append(f"{labels[arm]} shows no gain over {labels[comparison.baseline]} in {' or '.join(names)}.")
    return said


def _alpha(comparison: Comparison) -> list[str]:
    """For arms that share every setting but the strength of exploration: what the seeds show against alpha = 0."""
    families: dict[str, dict[str, float]] = {}
    for arm, by_seed in comparison.arms.items():
        trained = next(iter(by_seed.values()))
        settings = arm_settings(trained.record, trained.name)
        alpha = settings.pop("alpha")
        settings.pop("exploration_coefficient")
        if alpha is not None:
            families.setdefault(json.dumps(settings, sort_keys=True, default=str), {})[arm] = alpha
    said = []
    for alphas in families.values():
        others = sorted((arm for arm, alpha in alphas.items() if alpha), key=alphas.__getitem__)
        found = [d for arm in others for d in _tested(comparison, arm)]
        if alphas.get(comparison.baseline) != 0 or not found:
            continue
        values = ", ".join(f"{alphas[arm]:g}" for arm in others)
        shown = "; ".join(f"{comparison.labels[d.arm]}: {_in_words(d)}" for d in found if d.shown)
        outcome = f"no difference is shown in {', '.join(dict.fromkeys(plain(d.metric) for d in found))}"
        if shown:
            outcome = f"{sum(d.shown for d in found)} of {len(found)} differences are shown ({shown})"
        said.append(f"Alpha {values} against 0: {outcome}.")
    return said


def _matched(comparison: Comparison) -> list[str]:
    matched, labels = comparison.matched, comparison.labels
    if len(comparison.arms) < 2:
        return []
    left_out = []
    for arm, reasons in matched.left_out.items():
        seeds = "" if comparison.is_one else f" in {count(len(reasons), 'seed')}"
        reason = next(iter(reasons.values()))
        left_out.append(f"{labels[arm]} is left out of the matched comparison{seeds}: {reason}.")
    if not matched.accuracies:
        return ["No comparison at matched accuracy is possible.", *left_out]
    levels = ", ".join(
        f"{accuracy:.3f}" + ("" if comparison.is_one else f" (seed {seed})")
        for seed, accuracy in matched.accuracies.items()
    )
    readings = [
        f"{plain(measure)}: {_readings(comparison, measure)}." for measure, found in matched.values.items() if found
    ]
    caution = " The values are of one run each and carry no interval: small differences between them are no evidence."
    return [
        f"At matched accuracy on the training problems, around {levels} (the middle of a range that the compared arms "
        f"all passed): {' '.join(readings) or 'nothing was measured.'} Arms learn at different speeds, so this is the "
        f"fairer view of diversity.{caution if comparison.is_one else ''}",
        *left_out,
    ]


def _readings(comparison: Comparison, measure: str) -> str:
    """Each arm's matched value, with its difference from the baseline there."""
    matched, readings = comparison.matched, []
    for arm in comparison.arms:
        value, apart = matched.values[measure].get(arm), matched.differences[measure].get(arm)
        if value is not None:
            distance = f" ({signed(apart)})" if apart else ""
            readings.append(f"{comparison.labels[arm]} {value.interval.mean:.3f}{distance}")
        elif len(matched.left_out.get(arm, ())) < len(comparison.seeds):
            readings.append(f"{comparison.labels[arm]} not measured")
    return "; ".join(readings)


# --- the table of a terminal ------------------------------------------------------------------------------------------


def terminal_table(comparison: Comparison) -> str:
    """The main metrics in 80 columns: each arm's means, and its 95 % intervals under them. Labels are whole.

    A star marks a mean whose difference from the baseline several seeds show.
    """
    metrics = [metric for metric in main_metrics(comparison.metrics) if metric != POOLED]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("arm", width=LABEL_WIDTH)
    for metric in metrics:
        table.add_column(short_name(metric), justify="right", width=9)
    for arm, label in comparison.labels.items():
        table.add_row(label, *(_two_lines(comparison, arm, metric) for metric in metrics))
    if comparison.noise:
        noise = [f"±{comparison.noise[metric]:.3f} " if metric in comparison.noise else "" for metric in metrics]
        table.add_row("noise of training", *noise)
    seeds = f"one seed ({comparison.seeds[0]})" if comparison.is_one else count(len(comparison.seeds), "seed")
    over = "" if comparison.is_one else "seeds; "
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table, f"95 % intervals over {over}{comparison.problems} problems, {seeds}.")
    if any(difference.shown for difference in comparison.differences):
        console.print(
            f"* differs from {comparison.labels[comparison.baseline]} (t test over seeds, Holm's correction)."
        )
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _two_lines(comparison: Comparison, arm: str, metric: str) -> str:
    cell, difference = comparison.cell(arm, metric), comparison.difference(arm, metric)
    if cell is None:
        return "-"
    ends = f"{_short(cell.interval.low)}-{_short(cell.interval.high)}" if cell.known else ""
    return f"{cell.interval.mean:.3f}{'*' if difference and difference.shown else ' '}\n{ends}"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2f}"
