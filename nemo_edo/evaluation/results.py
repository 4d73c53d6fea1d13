"""What an evaluation is: its metrics' names and their order, and the record of one policy's results.

Dimensions: P test problems, the same ones in the same order for every policy that is compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.metrics.intervals import Interval, bootstrap_ratio, bootstrap_ratios
from nemo_edo.metrics.paired import solved_and_lost
from nemo_edo.utils.files import read_object

START = "warmup"
"""The name under which the policy that every arm starts from is evaluated."""
KINDS = ("greedy", "sampled")
"""What an evaluation generates: one greedy response to each problem, and the sampled ones."""
SAMPLED_ENTROPY = "entropy_sampled"
"""The mean entropy as the sampled tokens' log-probabilities estimate it, without the whole distributions."""
JUDGE_AND_RULES = ("judge_agreement", "accuracy_by_judge", "accuracy_by_rules")
"""Over the responses that both a judge and the rules compared."""
NAMES = {
    "greedy_accuracy": "greedy accuracy",
    "accuracy": "sampled accuracy",
    "reward": "mean reward",
    "vote@": "vote@",
    "pass@": "pass@",
    "distinct_4": "Distinct-4",
    "distinct_answers": "distinct answers",
    "answer_entropy": "answer entropy (nats)",
    "entropy": "entropy (nats)",
    SAMPLED_ENTROPY: "entropy (nats), from samples",
    "well_formed": "well-formed",
    "response_length": "length (tokens)",
    "abstained": "without a verdict",
    "judge_agreement": "judge and rules agree",
    "accuracy_by_judge": "accuracy by the judge, of these",
    "accuracy_by_rules": "accuracy by the rules, of these",
}
"""Metrics as a reader knows them, in the order of a table; a family such as ``pass@`` goes by its number."""
Sums = dict[str, tuple[float, float]]
"""metric -> (sum, count) on one problem."""
NOTHING = (0.0, 0.0)
"""The sum and the count where a problem has nothing to measure."""


@dataclass(frozen=True)
class Evaluation:
    """One policy's results on the test problems, kept for each problem so that policies can be paired."""

    arm: str
    problems: tuple[str, ...]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    """name -> (sums [P], counts [P]) float64; the metric is sum(sums) / sum(counts)."""

    @classmethod
    def of_rows(cls, arm: str, problems: Sequence[str], rows: Sequence[Sums]) -> Evaluation:
        """``rows``: of each problem its metrics, the same ones for every problem."""
        metrics = {
            name: (np.array([row[name][0] for row in rows]), np.array([row[name][1] for row in rows]))
            for name in rows[0]
        }
        return cls(arm, tuple(problems), metrics)

    def has(self, metric: str) -> bool:
        """Whether the metric was measured on any problem."""
        return metric in self.metrics and self.metrics[metric][1].sum() > 0

    def mean(self, metric: str) -> float:
        """sum(sums) / sum(counts); NaN if it was not measured on any problem."""
        if not self.has(metric):
            return math.nan
        sums_P, counts_P = self.metrics[metric]
        return float(sums_P.sum() / counts_P.sum())

    def interval(self, metric: str, *, resamples: int, seed: int) -> Interval | None:
        """The metric with its 95 % bootstrap interval over problems; None if it was not measured on any problem."""
        if not self.has(metric):
            return None
        return bootstrap_ratio(*self.metrics[metric], resamples=resamples, seed=seed)

    def intervals(self, *, resamples: int, seed: int) -> dict[str, Interval]:
        """``interval`` of each metric that was measured on any problem, from the same resamples."""
        measured = [metric for metric in self.metrics if self.has(metric)]
        found = bootstrap_ratios([self.metrics[metric] for metric in measured], resamples=resamples, seed=seed)
        return dict(zip(measured, found, strict=True))

    def means(self, *, resamples: int, seed: int) -> dict[str, dict[str, float]]:
        """``intervals`` as "mean", "low" and "high"."""
        return {metric: asdict(found) for metric, found in self.intervals(resamples=resamples, seed=seed).items()}

    def record(self) -> dict[str, Any]:
        """The content of ``evaluations/ARM.json``, which ``load_evaluation`` reads."""
        metrics = {
            name: {"sum": sums_P.tolist(), "count": counts_P.tolist()}
            for name, (sums_P, counts_P) in self.metrics.items()
        }
        return {"arm": self.arm, "problems": list(self.problems), "metrics": metrics}


def load_evaluation(path: Path) -> Evaluation:
    """Read ``evaluations/ARM.json``. Raises UserError naming the file and what in it is missing or malformed."""
    record = read_object(path, ("arm", "problems", "metrics"))
    try:
        problems = tuple(record["problems"])
        pairs = {name: (metric["sum"], metric["count"]) for name, metric in record["metrics"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: expected a list of problems, and sum and count of each metric ({error!r})") from error
    if not problems:
        raise UserError(f"{path}: problems is empty, expected at least one problem")
    metrics = {name: _per_problem(path, name, len(problems), *pair) for name, pair in pairs.items()}
    return Evaluation(record["arm"], problems, metrics)


def _per_problem(path: Path, name: str, size: int, sums: object, counts: object) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: metrics.{name}: sum and count must be lists of numbers") from error
    for key, array in zip(("sum", "count"), arrays, strict=True):
        if array.shape != (size,) or not np.isfinite(array).all():
            raise UserError(f"{path}: metrics.{name}.{key}: expected {size} finite numbers, one for each problem")
    if (arrays[1] < 0).any():
        raise UserError(f"{path}: metrics.{name}.count: a count is below 0")
    return arrays


def require_same_problems(evaluations: Mapping[str, Evaluation]) -> None:
    """Raises UserError naming two of them (name -> evaluation) where they answered different problems."""
    names = list(evaluations)
    for name in names[1:]:
        if evaluations[name].problems != evaluations[names[0]].problems:
            first, other = (len(evaluations[one].problems) for one in (names[0], name))
            raise UserError(
                f"{names[0]} and {name} were evaluated on different problems ({first} and {other}), or in another "
                "order; differences are paired by problem, so evaluate both on the same file"
            )


def solved(evaluation: Evaluation) -> dict[str, bool]:
    """Problem id -> whether the greedy response to it has the full reward."""
    sums_P, counts_P = evaluation.metrics["greedy_accuracy"]
    return dict(zip(evaluation.problems, ((counts_P > 0) & (sums_P >= counts_P)).tolist(), strict=True))


def newly_solved_and_lost(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Numbers of test problems, by the greedy response: wrong ``before`` and right ``after``, and the other way round.

    Raises ValueError where the two were evaluated on different problems.
    """
    changes = solved_and_lost(solved(before), solved(after))
    return {"newly_solved": float(len(changes.newly_solved)), "lost": float(len(changes.lost))}


def metric_name(metric: str) -> str:
    """The metric as a reader knows it."""
    return NAMES.get(metric, metric)


def metric_order(metric: str) -> tuple[int, int, str]:
    """Sort key: the metrics of ``NAMES`` first, vote@N and pass@k by their number, then the rest by name."""
    family, number = re.fullmatch(r"(.*?)(?:(?<=@)(\d+))?", metric).groups()
    families = list(NAMES)
    return families.index(family) if family in NAMES else len(families), int(number or 0), metric


def largest(metrics: Sequence[str], family: str) -> str | None:
    """The metric of the family (``vote@`` or ``pass@``) with the largest number."""
    return max((metric for metric in metrics if metric.startswith(family)), key=metric_order, default=None)


def main_metrics(metrics: Sequence[str]) -> list[str]:
    """The metrics on which arms are compared: of vote@N and pass@k the largest only."""
    voted, passed = largest(metrics, "vote@"), largest(metrics, "pass@")
    chosen = ("greedy_accuracy", "accuracy", voted, passed, "distinct_4", "entropy")
    return [metric for metric in chosen if metric in metrics]
