"""A comparison in words and as a plain-text table: what was measured, what the seeds show, and what limits it.

Verdicts (better, higher) are for differences that several seeds show, corrected for their number. One seed has values
and differences only, next to the distance between two trainings of the baseline.
"""

import io
from itertools import product

from rich import box
from rich.console import Console
from rich.table import Table

from nemo_edo.config import NONE
from nemo_edo.config.training import ONE_STEP
from nemo_edo.evaluation.results import POOLED, START, largest, main_metrics, metric_name, short_interval
from nemo_edo.metrics.intervals import POWER
from nemo_edo.report.comparison import LEVEL, Comparison, Difference, Estimate

MALFORMED_BELOW = 0.5
"""An arm with a smaller share of well-formed answers has broken down; its entropy and diversity are not a merit."""
TRUNCATED_ABOVE = 0.1
MOST_NAMED = 3
WIDTH, LABEL_WIDTH = 80, 19
"""Columns of a terminal, and those of a label: a longer one takes several lines."""
METHOD = f"t tests over seeds, Holm's correction, level {LEVEL:g}"
_SHORT_NAMES = {"greedy_accuracy": "greedy", "accuracy": "sampled", "distinct_4": "dist-4", "entropy": "entropy"}


def conclusions(comparison: Comparison) -> list[str]:
    """What the runs show and do not show, one paragraph per string: the result in one sentence first."""
    labels, said = comparison.labels, [_result(comparison), *_limits(comparison)]
    for arm in comparison.arms:
        if found := _tested(comparison, arm):
            unclear = [f"{plain(d.metric)} ({d.interval.mean:+.3f})" for d in found if not d.shown]
            shown = [", ".join(_in_words(d) for d in found if d.shown)] if len(unclear) < len(found) else []
            outcome = "; ".join([*shown, *([f"no difference shown in {', '.join(unclear)}"] if unclear else [])])
            over = f"{labels[comparison.baseline]}, {count(len(found[0].by_seed), 'seed')}"
            said.append(f"{labels[arm]} against {over}: {outcome}.")
    return [*said, *_exploration(comparison), *_matched(comparison), _scope(comparison)]


# --- words ------------------------------------------------------------------------------------------------------------


def count(number: int, noun: str) -> str:
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
    return metric_name(metric).removesuffix(" (nats)")


def short_name(metric: str) -> str:
    return _SHORT_NAMES.get(metric, metric_name(metric))


def _in_words(difference: Difference) -> str:
    return f"{direction(difference)} {plain(difference.metric)} ({signed(difference)})"


def _tested(comparison: Comparison, arm: str | None = None) -> list[Difference]:
    return [d for d in comparison.differences if len(d.by_seed) > 1 and arm in (None, d.arm)]


# --- paragraphs -------------------------------------------------------------------------------------------------------


def _result(comparison: Comparison) -> str:
    labels, tested, differences = comparison.labels, _tested(comparison), comparison.differences
    if not differences:
        last = list(labels)[-1]
        found = [(metric, comparison.cell(last, metric)) for metric in main_metrics(comparison.metrics)]
        means = ", ".join(f"{plain(metric)} {cell.interval.mean:.3f}" for metric, cell in found if cell)
        if trains_nothing(comparison):
            return f"{labels[last]}, on {comparison.problems} test problems: {means}."
        missing = "second arm to compare with" if len(labels) == 1 else "common metric with a baseline arm"
        return f"{labels[last]}: {means}. There is no {missing}."
    baseline = labels[comparison.baseline]
    if tested:
        over = f"Over {count(max(len(d.by_seed) for d in tested), 'seed')}"
        shown = [f"{labels[d.arm]}: {_in_words(d)}" for d in tested if d.shown]
        those = f"{count(len(tested), 'difference')} from {baseline}"
        if not shown:
            metric = largest([d.metric for d in tested], "vote@") or tested[0].metric
            least = max(d.detectable for d in tested if d.metric == metric)
            return (
                f"{over}, none of the {those} is shown ({METHOD}). That is no evidence of equality: to be shown with "
                f"probability {POWER:g}, a true difference in {plain(metric)} would have to be about {least:.3f}."
            )
        more = [f"and {len(shown) - MOST_NAMED} more"] if len(shown) > MOST_NAMED else []
        verb = "is" if len(shown) == 1 else "are"
        return f"{over}, {len(shown)} of {those} {verb} shown ({METHOD}): {'; '.join(shown[:MOST_NAMED] + more)}."
    metric = largest([d.metric for d in differences], "vote@") or differences[0].metric
    gaps = sorted((d for d in differences if d.metric == metric), key=lambda d: d.interval.mean)
    span = " to ".join(dict.fromkeys(f"{d.interval.mean:+.3f}" for d in (gaps[0], gaps[-1])))
    who = f"{labels[gaps[0].arm]} differs" if len(gaps) == 1 else f"{len(gaps)} arms differ"
    noise = "how much a second training would differ was not measured (replicate_baseline=true measures it)"
    if metric in comparison.noise:
        apart = f"{comparison.noise[metric]:.3f}"
        noise = f"{comparison.replicate}, trained again with other samples, differs from itself by {apart}"
    where = f"one seed ({comparison.seeds[0]})" if comparison.is_one else "one seed of each arm"
    return f"On {where}, {who} from {baseline} in {plain(metric)} by {span}; {noise}. One seed gives no verdict."


def _warned(comparison: Comparison) -> dict[str, dict[str, list[int]]]:
    """What the runs warned of while they trained: text -> the arm that it is about, or "" -> seeds."""
    said: dict[str, dict[str, list[int]]] = {}
    for record in comparison.runs.records:
        for one in record.summary.get("warnings", []):
            arm = next((arm for arm, by_seed in comparison.runs.policies.items() for trained in by_seed.values()
                        if trained.record is record and trained.name == one["arm"]), one["arm"])  # fmt: skip
            said.setdefault(one["text"], {}).setdefault(arm, []).append(record.seed)
    return said


def _limits(comparison: Comparison) -> list[str]:
    """Warnings, runs that were left out, arms with one seed, and arms whose answers were cut or lost their form."""
    said, labels = [], comparison.labels
    for text, arms in _warned(comparison).items():
        who = [
            f"{labels.get(arm, arm) or 'all arms'}"
            + ("" if comparison.is_one else f" (seed {','.join(map(str, seeds))})")
            for arm, seeds in arms.items()
        ]
        said.append(f"Warning, {', '.join(who)}: {text}.")
    for arm, by_seed in comparison.arms.items():
        shares = [trained.lines("collection") for trained in by_seed.values()]
        last = [float(lines["truncated"].iloc[-1]) for lines in shares if len(lines) and "truncated" in lines]
        if last and (share := sum(last) / len(last)) > TRUNCATED_ABOVE:
            said.append(
                f"{labels[arm]}: {share:.0%} of the responses of its last iteration reached the length limit "
                "(sampling.max_new_tokens) and count as wrong."
            )
    if comparison.runs.left_out:
        named = "; ".join(f"{folder}: {reason}" for folder, reason in comparison.runs.left_out.items())
        said.append(f"Left out, because incomplete: {named}.")
    single = [labels[arm] for arm, by_seed in comparison.arms.items() if len(by_seed) == 1]
    if single and not comparison.is_one:
        has = "has" if len(single) == 1 else "have"
        which = "Every arm has" if len(single) == len(comparison.arms) else f"{' and '.join(single)} {has}"
        said.append(f"{which} one seed only, so nothing is claimed there: a difference may be the noise of training.")
    formed = {arm: cell.interval.mean for arm in labels if (cell := comparison.cell(arm, "well_formed"))}
    if formed.get(START, 1.0) >= MALFORMED_BELOW:  # otherwise an arm as bad has not broken down
        said += [
            f"{labels[arm]} broke down: only {share:.0%} of its answers are well-formed. Read its entropy and "
            "diversity as noise, not as exploration."
            for arm, share in formed.items()
            if share < MALFORMED_BELOW
        ]
    return said


def trains_nothing(comparison: Comparison) -> bool:
    """Whether it is one evaluation of a model as it is: there is nothing to say of arms and seeds."""
    return comparison.is_one and comparison.runs.records[0].config.get("algorithm") == NONE


def _scope(comparison: Comparison) -> str:
    problems, seeds = f"{comparison.problems} test problems", ", ".join(map(str, comparison.seeds))
    if trains_nothing(comparison):
        return "The 95 % intervals cover the choice of test problems."
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


def _exploration(comparison: Comparison) -> list[str]:
    if comparison.baseline in (None, START):
        return []
    labels, said = comparison.labels, []
    settings = {arm: next(iter(by_seed.values())).settings for arm, by_seed in comparison.arms.items()}
    without = [arm for arm, known in settings.items() if known.exploration_weight == 0]
    metrics = [largest(comparison.metrics, family) for family in ("vote@", "pass@")]
    idle = {arm for text, arms in _warned(comparison).items() if text.startswith(ONE_STEP) for arm in arms}
    for arm in (arm for arm in settings if arm not in without):
        found = [d for d in _tested(comparison, arm) if d.metric in metrics]
        gains = [d for d in found if direction(d) == "better"]
        names = [metric_name(d.metric) for d in gains or found]
        if gains:
            plainer = [
                f"{labels[other]} {signed(difference)} in {metric_name(d.metric)}"
                for other, d in product(without, gains)
                if (difference := comparison.difference(other, d.metric))
            ]
            others = "No other arm without exploration was run, so it is open whether a plainer method does as well."
            if plainer:
                others = f"The other arms without exploration, for comparison: {', '.join(plainer)}."
            where = f"in {' and '.join(names)} over {count(len(found[0].by_seed), 'seed')}"
            said.append(f"{labels[arm]} exceeds {labels[comparison.baseline]} {where}. {others}")
        elif found and arm in idle:
            said.append(f"{labels[arm]} took {ONE_STEP}, where exploration adds noise only: this is no test of it.")
        elif found:
            said.append(f"{labels[arm]} shows no gain over {labels[comparison.baseline]} in {' or '.join(names)}.")
    return said


def _matched(comparison: Comparison) -> list[str]:
    matched, labels, is_one = comparison.matched, comparison.labels, comparison.is_one
    if len(comparison.arms) < 2:
        return []
    left_out = []
    for arm, reasons in matched.left_out.items():
        seeds = "" if is_one else f" in {count(len(reasons), 'seed')}"
        [reason, *_] = reasons.values()
        left_out.append(f"{labels[arm]} is left out of the matched comparison{seeds}: {reason}.")
    if not matched.accuracies:
        return ["No comparison at matched accuracy is possible.", *left_out]
    levels = [f"{level:.3f}" + ("" if is_one else f" (seed {seed})") for seed, level in matched.accuracies.items()]
    measured = []
    for measure, values in matched.values.items():
        readings = []
        for arm in comparison.arms:
            if value := values.get(arm):
                apart = matched.differences[measure].get(arm)
                distance = f" ({signed(apart)})" if apart else ""
                readings.append(f"{labels[arm]} {value.interval.mean:.3f}{distance}")
            elif len(matched.left_out.get(arm, ())) < len(comparison.seeds):
                readings.append(f"{labels[arm]} not measured")
        if values:
            measured.append(f"{plain(measure)}: {'; '.join(readings)}.")
    caution = " The values are of one run each and carry no interval: small differences between them are no evidence."
    return [
        f"At matched accuracy on the training problems, around {', '.join(levels)} (the middle of a range that the "
        f"compared arms all passed): {' '.join(measured) or 'nothing was measured.'} Arms learn at different speeds, "
        f"so this is the fairer view of diversity.{caution if is_one else ''}",
        *left_out,
    ]


# --- the table of a terminal ------------------------------------------------------------------------------------------


def terminal_table(comparison: Comparison) -> str:
    """The main metrics in 80 columns: each arm's means, and its 95 % intervals under them. Labels are whole.

    A star marks a mean whose difference from the baseline several seeds show.
    """
    metrics = [metric for metric in main_metrics(comparison.metrics) if metric != POOLED]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("arm", width=LABEL_WIDTH)
    for metric in metrics:
        table.add_column(short_name(metric), justify="right", width=10)
    for arm, label in comparison.labels.items():
        texts = []
        for cell, difference in ((comparison.cell(arm, m), comparison.difference(arm, m)) for m in metrics):
            star = "*" if difference and difference.shown else " "
            short = short_interval(cell.interval) if cell and cell.known else ""
            texts.append(f"{cell.interval.mean:.3f}{star}\n{short}" if cell else "-")
        table.add_row(label, *texts)
    if comparison.noise:
        noise = [f"±{comparison.noise[metric]:.3f} " if metric in comparison.noise else "" for metric in metrics]
        table.add_row("noise of training", *noise)
    over = "" if comparison.is_one else "seeds; "
    seeds = f", one seed ({comparison.seeds[0]})" if comparison.is_one else f", {count(len(comparison.seeds), 'seed')}"
    seeds = "" if trains_nothing(comparison) else seeds
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table, f"95 % intervals over {over}{comparison.problems} problems{seeds}.")
    if any(difference.shown for difference in comparison.differences):
        baseline = comparison.labels[comparison.baseline]
        console.print(f"* differs from {baseline} (t test over seeds, Holm's correction).")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
