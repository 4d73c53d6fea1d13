"""What an evaluation is: its metrics' names and their order, and the record of one policy's results.

Dimensions: P test problems, the same ones in the same order for every policy that is compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_edo.config import EvaluationConfig
from nemo_edo.config.run import BEST, START
from nemo_edo.errors import UserError
from nemo_edo.metrics.intervals import Interval, bootstrap_ratios, mean_interval, share_intervals
from nemo_edo.metrics.paired import paired_difference, solved_and_lost
from nemo_edo.utils.files import read_object

LONGEST_NAME = 120
GREEDY = "greedy"
KINDS = (GREEDY, "sampled")
"""What every evaluation generates: one greedy response to each problem, and those sampled at its first temperature.
``kinds`` has what its settings add."""
AT_BEST = "/best"
"""Ends the names of metrics at the temperature that was best on training problems."""
BEST_TEMPERATURE = "best_temperature"
SAMPLED_ENTROPY = "entropy_sampled"
"""The mean entropy as the sampled tokens' log-probabilities estimate it, without the whole distributions."""
OF_ANSWERS = ("distinct_answers", "answer_entropy")
"""Metrics that, as votes, need responses that state an answer."""
JUDGE_AND_RULES = ("judge_agreement", "accuracy_by_judge", "accuracy_by_rules")
"""Metrics over the responses that both a judge and the rules compared."""
POOLED = "distinct_4_pooled"
"""Distinct-4 of the responses to all problems together, the paper's; ``distinct_4`` is a mean over problems."""
NAMES = {
    "greedy_accuracy": "greedy accuracy",
    "accuracy": "sampled accuracy",
    "reward": "mean reward",
    "vote@": "vote@",
    "pass@": "pass@",
    **{f"distinct_{n}": f"Distinct-{n} per problem" for n in range(1, 5)},
    POOLED: "pooled Distinct-4",
    "distinct_answers": "distinct answers",
    "answer_entropy": "answer entropy (nats)",
    "entropy": "entropy (nats)",
    SAMPLED_ENTROPY: "entropy (nats), from samples",
    "well_formed": "well-formed",
    "response_length": "length (tokens)",
    "abstained": "without a verdict",
    BEST_TEMPERATURE: "best temperature",
    "judge_agreement": "judge and rules agree",
    "accuracy_by_judge": "accuracy by the judge, of these",
    "accuracy_by_rules": "accuracy by the rules, of these",
}
"""Metrics as a reader knows them, in the order of a table; a family such as ``pass@`` goes by its number."""
SHARES = {
    *("greedy_accuracy", "accuracy", "search_accuracy", "well_formed", "abstained", *JUDGE_AND_RULES),
    *(f"distinct_{n}" for n in range(1, 5)),
    *("vote@", "pass@", "majority@", "best_of@", "weighted@"),
    *("vote", "pass"),
}
"""The metrics, and families, that are between 0 and 1 for every problem; vote and pass are columns of a study's table,
those of the largest number."""
Sums = dict[str, tuple[float, float]]
Pair = tuple[np.ndarray, np.ndarray]
NOTHING = (0.0, 0.0)
"""The sum and the count where a problem has nothing to measure."""


def check_arm_names(arms: Iterable[str]) -> None:
    """Raises UserError for a name that cannot be that of an arm's folders and files."""
    for arm in arms:
        if arm == START:
            raise UserError(f"arms.{arm}: {START} is the name of the start of all arms; choose another name")
        fits = "/" not in arm and arm.isprintable() and 0 < len(arm.encode()) <= LONGEST_NAME
        if not fits or arm.startswith(".") or arm.endswith((".progress", ".part")):
            raise UserError(
                f"arms.{arm[:40]!r}: an arm's name has no / and no line break, no . at its beginning, and at most "
                f"{LONGEST_NAME} bytes"
            )
        if BEST in arm:
            raise UserError(f"arms.{arm!r}: {BEST} in a name is for an arm's best policies; choose another name")


@dataclass(frozen=True)
class Evaluation:
    """One policy's results on the test problems, kept for each problem so that policies can be paired."""

    arm: str
    problems: tuple[str, ...]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    """name -> (sums [P], counts [P]) float64; the metric is sum(sums) / sum(counts)."""
    temperature: float = 1.0
    """The sampled responses', where a metric's name has no other; evaluations before this was recorded had 1."""
    samples: int | None = None
    """The number of responses that votes and diversity are measured among; None before this was recorded."""

    @classmethod
    def of_rows(
        cls, arm: str, problems: Sequence[str], rows: Sequence[Sums], *, temperature: float = 1.0,
        samples: int | None = None,
    ) -> Evaluation:  # fmt: skip
        """``rows``: the metrics of each problem, the same ones for every problem."""
        pairs = {name: (*np.array([row[name] for row in rows], float).T,) for name in rows[0]}
        return cls(arm, tuple(problems), pairs, temperature, samples)

    def has(self, metric: str) -> bool:
        return metric in self.metrics and self.metrics[metric][1].sum() > 0

    def mean(self, metric: str) -> float:
        """sum(sums) / sum(counts); NaN if it was not measured on any problem."""
        if not self.has(metric):
            return math.nan
        sums_P, counts_P = self.metrics[metric]
        return float(sums_P.sum() / counts_P.sum())

    def grain(self, metric: str) -> float:
        """The least step of the metric's mean, such as one right answer more."""
        sums_P, counts_P = self.metrics[metric]
        return float(np.diff(np.unique(sums_P.round(9))).min(initial=1.0) / counts_P.sum())

    def intervals(self, *, resamples: int, seed: int) -> dict[str, Interval]:
        """95 % intervals over problems (``ratio_intervals``) of the metrics that were measured on any problem."""
        measured = {metric: pair for metric, pair in self.metrics.items() if self.has(metric)}
        return ratio_intervals(measured, resamples=resamples, seed=seed)

    def means(self, *, resamples: int, seed: int) -> dict[str, dict[str, float]]:
        return {metric: asdict(found) for metric, found in self.intervals(resamples=resamples, seed=seed).items()}

    def record(self) -> dict[str, Any]:
        metrics = {name: {"sum": pair[0].tolist(), "count": pair[1].tolist()} for name, pair in self.metrics.items()}
        about = {"arm": self.arm, "temperature": self.temperature, "samples": self.samples}
        return {**about, "problems": list(self.problems), "metrics": metrics}


def load_evaluation(path: Path) -> Evaluation:
    """Read ``evaluations/ARM.json``. Raises UserError naming the file and what in it is missing or malformed."""
    record = read_object(path, ("arm", "problems", "metrics"))
    try:
        problems, temperature = tuple(record["problems"]), float(record.get("temperature", 1.0))
        samples = None if record.get("samples") is None else int(record["samples"])
        metrics = {name: np.asarray([one["sum"], one["count"]], float) for name, one in record["metrics"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: expected a list of problems, and sum and count of each metric ({error!r})") from error
    if not problems:
        raise UserError(f"{path}: problems is empty, expected at least one problem")
    for name, pair in metrics.items():
        fits = name.isprintable() and pair.shape == (2, len(problems))
        if not fits or not np.isfinite(pair).all() or (pair[1] < 0).any():
            raise UserError(
                f"{path}: metrics.{name!r}: expected sums and counts (of at least 0) of {len(problems)} problems"
            )
        if is_share(name) and (np.abs(pair[0] - pair[1] / 2) > pair[1] * (0.5 + 1e-9)).any():
            raise UserError(f"{path}: metrics.{name}: expected sums between 0 and the counts")
    pairs = {name: (*pair,) for name, pair in metrics.items()}
    return Evaluation(record["arm"], problems, pairs, temperature, samples)


def require_same_problems(evaluations: Mapping[str, Evaluation]) -> None:
    """Raises UserError naming two of them (name -> evaluation) where they answered different problems, or at different
    temperatures, or with other numbers of samples, by which diversity differs, too."""
    (first, ours), *others = evaluations.items()
    for name, theirs in others:
        for setting in ("temperature", "samples"):
            one, another = (getattr(evaluation, setting) for evaluation in (ours, theirs))
            if None not in (one, another) and one != another:
                raise UserError(
                    f"{first} and {name} were evaluated with different settings: evaluation.{setting} is {one:g} in "
                    f"the one and {another:g} in the other; evaluate both with the same"
                )
        if ours.problems != theirs.problems:
            raise UserError(
                f"{first} and {name} were evaluated on different problems ({len(ours.problems)} and "
                f"{len(theirs.problems)}), or in another order; differences are paired by problem, so evaluate both "
                "with the same data.test and evaluation.limit"
            )


def newly_solved_and_lost(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Numbers of test problems, by the greedy response (full reward): wrong ``before`` and right ``after``, and the
    other way round, of those with a verdict on both. Raises ValueError where the two were evaluated on different
    problems."""
    pairs = ((one.problems, zip(*one.metrics["greedy_accuracy"], strict=True)) for one in (before, after))
    each = [dict(zip(problems, of_problems, strict=True)) for problems, of_problems in pairs]
    unjudged = {problem for of_policy in each for problem, (_, count) in of_policy.items() if count == 0}
    if unjudged >= each[0].keys() | each[1].keys():
        return {"newly_solved": 0.0, "lost": 0.0}
    changes = solved_and_lost(
        *({name: bool(total >= count) for name, (total, count) in one.items() if name not in unjudged} for one in each)
    )
    return {"newly_solved": float(len(changes.newly_solved)), "lost": float(len(changes.lost))}


def is_share(metric: str) -> bool:
    return re.sub(r"(?<=@)\d+.*", "", plain_name(metric)) in SHARES


def ratio_intervals(pairs: Mapping[str, Pair], *, resamples: int, seed: int) -> dict[str, Interval]:
    """Each metric's sum(sums) / sum(counts) with its 95 % interval over problems, all with the same random numbers:
    ``share_intervals``, and of what is no share the bootstrap."""
    of_shares = {metric: pair for metric, pair in pairs.items() if is_share(metric)}
    others = {metric: pair for metric, pair in pairs.items() if not is_share(metric)}
    found = dict(zip(of_shares, share_intervals([*of_shares.values()], resamples=resamples, seed=seed), strict=True))
    found |= zip(others, bootstrap_ratios([*others.values()], resamples=resamples, seed=seed), strict=True)
    return {metric: found[metric] for metric in pairs}


def paired_interval(metric: str, a: Pair, b: Pair, *, resamples: int, seed: int) -> tuple[Interval, float]:
    """The metric of a minus that of b on the same problems, with its 95 % interval over problems and the p-value of no
    difference, of one test (``metrics.paired_difference``)."""
    return paired_difference(*a, *b, resamples=resamples, seed=seed, share=is_share(metric))


def seeds_interval(
    metric: str, values: Sequence[float], *, differences: bool = False, rounding: float = 0.0
) -> Interval:
    """The mean over seeds with its 95 % interval (``mean_interval``), which for a share is within [0, 1], and for
    ``differences`` of shares within [-1, 1]."""
    found = mean_interval(values, rounding=rounding)
    if not (is_share(metric) or plain_name(metric) == POOLED) or math.isnan(found.low):
        return found
    return Interval(found.mean, max(found.low, -1.0 if differences else 0.0), min(found.high, 1.0))


def short_interval(interval: Interval) -> str:
    """The interval's ends in nine characters at most, for the narrow columns of a terminal: .74-1.00, 10.6-10.7."""
    digits = [2 if abs(end) < 9.995 else 1 if abs(end) < 99.95 else 0 for end in (interval.low, interval.high)]
    ends = (f"{end:.{n}f}" for end, n in zip((interval.low, interval.high), digits, strict=True))
    return "-".join(end.replace("0.", ".", 1) if end.lstrip("-").startswith("0.") else end for end in ends)


def plain_name(metric: str) -> str:
    return _parts(metric)[0]


def kind_at(temperature: float, config: EvaluationConfig, *, tuning: bool = False) -> str:
    """What the responses at a temperature are stored as; ``tuning``: those to training problems."""
    if not tuning and temperature == config.temperature[0]:
        return KINDS[1]
    return f"{'tuning' if tuning else KINDS[1]}_t{temperature:g}"


def kinds(config: EvaluationConfig, *, final: bool) -> tuple[str, ...]:
    """What an evaluation generates. Only a ``final`` one samples at several temperatures."""
    others = [kind_at(temperature, config) for temperature in config.temperature[1:]]
    tuning = [kind_at(temperature, config, tuning=True) for temperature in config.temperature]
    return (*KINDS, *(others if final else ()), *(tuning if final and config.tuning_problems else ()))


def metric_name(metric: str) -> str:
    name, suffix = _parts(metric)
    at = "" if not suffix else ", best temperature" if suffix == AT_BEST else f", temperature {suffix[2:]}"
    return NAMES.get(name, name) + at


def metric_order(metric: str) -> tuple[str, int, int, str]:
    """Sort key: those of the first temperature, then by temperature; the metrics of ``NAMES`` first, vote@N and pass@k
    by their number, then the rest by name."""
    name, suffix = _parts(metric)
    family, number = re.fullmatch(r"(.*?)(?:(?<=@)(\d+))?", name).groups()
    families = list(NAMES)
    return suffix, families.index(family) if family in NAMES else len(families), int(number or 0), metric


def largest(metrics: Sequence[str], family: str, suffix: str = "") -> str | None:
    """The metric of the family (``vote@`` or ``pass@``) with the largest number, at the temperature of the suffix."""
    found = (metric for metric in metrics if metric.startswith(family) and _parts(metric)[1] == suffix)
    return max(found, key=metric_order, default=None)


def main_metrics(metrics: Sequence[str]) -> list[str]:
    """The metrics that a reader sees first: of vote@N and pass@k the largest only."""
    voted, passed = largest(metrics, "vote@"), largest(metrics, "pass@")
    chosen = ("greedy_accuracy", "accuracy", voted, passed, "distinct_4", POOLED, "entropy")
    return [metric for metric in chosen if metric in metrics]


def _parts(metric: str) -> tuple[str, str]:
    """The name at the first temperature, and what stands for another temperature, or empty."""
    if metric.startswith(("best_of@", "weighted@")):  # what follows their / is the name of a score
        return metric, ""
    name, suffix = re.fullmatch(r"(.*?)(/best|/t[\d.e+-]+)?", metric).groups()
    return name, suffix or ""
