"""Stored responses' curves and plain metrics as text, with 95 % intervals over problems, and paired differences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import (
    JUDGE_AND_RULES,
    POOLED,
    SAMPLED_ENTROPY,
    Evaluation,
    metric_name,
    paired_interval,
)
from nemo_edo.evaluation.stored import ORACLE
from nemo_edo.metrics.intervals import Interval
from nemo_edo.metrics.paired import cohen_kappa, holm, mcnemar, paired_permutation_test

PLAIN = (
    *("greedy_accuracy", "accuracy", "reward", "distinct_4", POOLED, "distinct_answers", "answer_entropy"),
    SAMPLED_ENTROPY,
    *("well_formed", "response_length", "abstained", *JUDGE_AND_RULES),
)
COMPARED = ("greedy_accuracy", "accuracy", "distinct_4", SAMPLED_ENTROPY)
"""Plain metrics that are tested between arms, along with each curve at its largest k."""
LABEL_WIDTH, CELL_WIDTH, COLUMNS = 24, 10, 7


@dataclass(frozen=True)
class Tested:
    """arm - baseline on the same problems."""

    arm: str
    metric: str
    interval: Interval
    p: float
    """p-value of no difference: McNemar's exact test for greedy answers, otherwise the paired permutation test;
    adjusted by Holm's method for all that were tested together."""


def families(evaluation: Evaluation) -> dict[str, list[int]]:
    """Each curve, as its name with {} for k, and the k that it was measured at."""
    found: dict[str, list[int]] = {}
    for name in filter(evaluation.has, evaluation.metrics):
        if match := re.fullmatch(r"(.*?@)(\d+)(.*)", name):
            found.setdefault(f"{match[1]}{{}}{match[3]}", []).append(int(match[2]))
    return found


def shown_sizes(largest: int) -> list[int]:
    """The powers of two below the largest k, and that: as many of the largest as fit on a line."""
    powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return [*powers, largest][-COLUMNS:]


def table(evaluations: Mapping[str, Evaluation], *, resamples: int, seed: int) -> str:
    """One block for each arm, in at most 100 columns: its plain metrics, and its curves with intervals under them."""
    blocks = []
    for label, evaluation in evaluations.items():
        found = evaluation.intervals(resamples=resamples, seed=seed)
        lines = [f"{label}: {len(evaluation.problems)} problems, temperature {evaluation.temperature:g}"]
        for name, one in ((name, found[name]) for name in PLAIN if name in found):
            lines.append(f"  {metric_name(name):<38}{_number(one.mean)}  [{_number(one.low)}, {_number(one.high)}]")
        if evaluation.has(JUDGE_AND_RULES[0]):
            lines.append(f"  {'Cohen’s kappa of judge and rules':<38}{kappa(evaluation):.3f}")
        curves = families(evaluation)
        sizes = shown_sizes(max((k for measured in curves.values() for k in measured), default=1))
        lines.append(_line("of k responses", [f"k={k}" for k in sizes]))
        for family in curves:
            cells = [found.get(family.format(k)) for k in sizes]
            lines.append(_line(family.format("k"), [one and _number(one.mean) for one in cells]))
            if not family.startswith("tokens@"):
                lines.append(_line("", [one and f"{_short(one.low)}-{_short(one.high)}" for one in cells]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def kappa(evaluation: Evaluation) -> float:
    """Cohen's kappa of judge and rules, from the totals over problems."""
    same, judge, rules = (round(evaluation.metrics[name][0].sum()) for name in JUDGE_AND_RULES)
    compared = round(evaluation.metrics[JUDGE_AND_RULES[0]][1].sum())
    both = (judge + rules - (compared - same)) // 2
    return cohen_kappa(both, judge - both, rules - both, compared - judge - rules + both)


def differences(
    evaluations: Mapping[str, Evaluation], baseline: str, *, resamples: int, seed: int
) -> tuple[Tested, ...]:
    """Every other arm against the baseline. Raises UserError where two answered different problems."""
    base, found = evaluations[baseline], []
    for label, evaluation in evaluations.items():
        if evaluation.problems != base.problems:
            raise UserError(
                f"{label} and {baseline} were evaluated on different problems, or in another order; differences are "
                "paired by problem, so evaluate both on the same file"
            )
        curves = [family.format(max(sizes)) for family, sizes in families(evaluation).items()]
        for metric in [*COMPARED, *curves] if label != baseline else ():
            # Tokens are a cost, and the oracle's best of k equals pass@k.
            is_tested = not metric.startswith("tokens@") and not metric.endswith(f"/{ORACLE}")
            if is_tested and evaluation.has(metric) and base.has(metric):
                pair = evaluation.metrics[metric], base.metrics[metric]
                interval = paired_interval(metric, *pair, resamples=resamples, seed=seed)
                found.append(Tested(label, metric, interval, _p_value(metric, evaluation, base, seed)))
    adjusted = holm([one.p for one in found])
    return tuple(replace(one, p=float(p)) for one, p in zip(found, adjusted, strict=True))


def differences_table(tested: tuple[Tested, ...], baseline: str) -> str:
    lines = [f"differences from {baseline} on the same problems, 95 % intervals, p adjusted for {len(tested)} tests:"]
    for one in tested:
        interval = f"{one.interval.mean:+.4f} [{one.interval.low:+.4f}, {one.interval.high:+.4f}]"
        lines.append(f"  {one.arm:<24} {metric_name(one.metric):<34} {interval}  p = {one.p:.3g}")
    return "\n".join(lines)


def _p_value(metric: str, a: Evaluation, b: Evaluation, seed: int) -> float:
    """The p-value over the problems where both were measured."""
    (sums_a, counts_a), (sums_b, counts_b) = a.metrics[metric], b.metrics[metric]
    both = (counts_a > 0) & (counts_b > 0)
    values_a, values_b = sums_a[both] / counts_a[both], sums_b[both] / counts_b[both]
    if not both.any():
        return 1.0
    if metric == "greedy_accuracy" and np.isin([values_a, values_b], (0.0, 1.0)).all():
        return mcnemar(values_a, values_b)
    return paired_permutation_test(values_a, values_b, seed=seed)


def _line(label: str, cells: list[str | None]) -> str:
    return (f"  {label:<{LABEL_WIDTH}}" + "".join(f"{cell or '-':>{CELL_WIDTH}}" for cell in cells)).rstrip()


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _short(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 1 else f"{value:.2f}"
