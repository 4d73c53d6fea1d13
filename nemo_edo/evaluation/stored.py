"""From one sampling pass, many answers: what k responses are worth, computed from stored ones without a model.

Every curve is the mean over all subsets of k of a problem's responses: no subset is preferred, and a curve from one
sampling pass is unbiased at each k. Pass@k and best-of-k have closed forms. Votes have none that is cheap, so they are
averaged over windows of random circles: the responses are put in a circle in random order, and each of the n windows of
k neighbours is one subset. Every subset is as likely as any other, so the mean is unbiased; every response is in
equally many windows, so that k = 1, n - 1 and n are exact; and one circle serves all k at once. A response that a judge
gave no verdict on is left out of every count: a problem's curve ends at the number of its responses with a verdict.

Dimensions: P problems, N responses to each, n of them with a verdict, K = n sizes of subsets, A different answers, C
circles.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import ArrayLike

from nemo_edo.errors import UserError
from nemo_edo.evaluation import results
from nemo_edo.evaluation.evaluator import Samples, meaningless, plain_metrics
from nemo_edo.metrics import Interval, holm
from nemo_edo.metrics.paired import cohen_kappa
from nemo_edo.metrics.pass_at_k import pass_at_k
from nemo_edo.test_time.voting import aggregate_steps

ORACLE = "oracle"
Scores = Mapping[str, np.ndarray]
"""name -> [P, N], one score for each response; best-of-k takes the highest score."""
PLAIN = (
    *("greedy_accuracy", "accuracy", "reward", *(f"distinct_{n}" for n in range(1, 5)), results.POOLED),
    *("distinct_answers", "answer_entropy"),
    results.SAMPLED_ENTROPY,
    *("well_formed", "response_length", "abstained", *results.JUDGE_AND_RULES),
)
COMPARED = ("greedy_accuracy", "accuracy", "distinct_4", results.SAMPLED_ENTROPY)
"""Plain metrics that are tested between arms, along with each curve at its largest k."""
FEWEST_PATTERNS = 10_000
"""Sign patterns of a test: Holm's correction for many tests needs small p-values."""
LABEL_WIDTH, CELL_WIDTH, COLUMNS = 24, 10, 7


@dataclass(frozen=True)
class Tested:
    """arm - baseline on the same problems."""

    arm: str
    metric: str
    interval: Interval
    p: float
    """p-value of no difference by the test that the interval inverts, adjusted by Holm's method for all that were
    tested together: with several, an interval may leave out 0 where this is above 0.05."""

    @property
    def detectable(self) -> float:
        """The least true difference that one such test finds with probability 0.8, by the interval's width."""
        return (1.960 + 0.842) / (2 * 1.960) * (self.interval.high - self.interval.low)


def aggregated(name: str, steps: Sequence[Sequence[Sequence[float]]], how: str) -> np.ndarray:
    """[P, N] one score for each response from those of its steps (``aggregate_steps``). Raises UserError for scores
    that ``how`` does not take."""
    try:
        return np.array([[aggregate_steps(response, how) for response in problem] for problem in steps])
    except ValueError as error:
        raise UserError(f"evaluation.aggregation is {how}, which the scores {name} do not fit: {error}") from error


def analyse(
    arm: str,
    greedy: Samples,
    sampled: Samples,
    scores: Scores,
    *,
    each: int,
    subsets: int,
    seed: int,
    temperature: float = 1.0,
) -> results.Evaluation:
    """The stored responses' metrics, problem by problem.

    Those of an evaluation (``plain_metrics``), entropy_sampled (nats: minus the mean log-probability of the sampled
    tokens under their sampler, whose expectation is the mean entropy) and distinct_4_pooled (``pooled_distinct``). For
    every k from 1 to N: pass@k; majority@k; best_of@k/NAME and weighted@k/NAME of each score (weighted: where none
    is below 0), and best_of@k/oracle of the success itself; tokens@k, the mean number of tokens of k responses.

    reward only where rewards are graded; abstained only where a judge abstained; judge_agreement, the share on which
    judge and rules are the same, and the accuracy by each, only where both were applied.

    subsets: the fewest that a vote's expectation at a k is estimated from; ``seed`` fixes them, the same ones for a
    problem's place in every arm. temperature: of the sampled responses. Raises UserError for greedy and sampled
    responses to different problems, and for an N that is not a multiple of ``each``.
    """
    if greedy.problems != sampled.problems:
        raise UserError(f"{arm}: the stored greedy and sampled responses answer different problems; evaluate it again")
    total = sampled.rewards.shape[1]
    if total % each:
        raise UserError(
            f"{arm}: {total} responses to each problem are stored, which evaluation.samples={each} does not divide; "
            "give the evaluation.samples that they were generated with"
        )
    rows = plain_metrics(sampled, each, greedy)
    for place, row in enumerate(rows):
        compared = sampled.rules[place] >= 0
        judge, rules = sampled.rewards[place, compared] == 1, sampled.rules[place, compared] == 1
        agreement = ((judge == rules).sum(), judge.sum(), rules.sum())
        row |= {n: (float(c), float(compared.sum())) for n, c in zip(results.JUDGE_AND_RULES, agreement, strict=True)}
        row |= _curves(sampled, place, scores, subsets, seed)
    unneeded = meaningless(greedy, sampled)
    if unneeded.issuperset(results.OF_ANSWERS):
        unneeded.update(name for name in rows[0] if name.startswith(("majority@", "weighted@")))
    if (sampled.rules < 0).all():
        unneeded.update(results.JUDGE_AND_RULES)
    kept_rows = [{name: pair for name, pair in row.items() if name not in unneeded} for row in rows]
    return results.Evaluation.of_rows(arm, sampled.problems, kept_rows, temperature=temperature, samples=each)


def _curves(sampled: Samples, place: int, scores: Scores, subsets: int, seed: int) -> results.Sums:
    """Every curve of a problem at each k up to N; nothing beyond the number of its responses with a verdict."""
    with_verdict = np.flatnonzero(sampled.has_verdict[place])
    right, answers = sampled.successes[place, with_verdict], sampled.answers[place, with_verdict].tolist()
    judged, total, rewards = len(with_verdict), len(sampled.has_verdict[place]), right.astype(np.float64)
    circles = sample_circles(judged, subsets, np.random.default_rng([seed, place])) if judged else None
    curves = {
        "tokens@{}": sampled.lengths[place].mean() * np.arange(1, total + 1),
        "pass@{}": pass_curve(judged, int(right.sum())),
        "majority@{}": vote_curve(answers, right, circles) if judged else (),
        f"best_of@{{}}/{ORACLE}": best_of_curve(rewards, rewards) if judged else (),
    }
    for name, scores_PN in scores.items():
        own = scores_PN[place, with_verdict]
        curves[f"best_of@{{}}/{name}"] = best_of_curve(own, rewards) if judged else ()
        if (scores_PN >= 0).all():
            curves[f"weighted@{{}}/{name}"] = vote_curve(answers, right, circles, own) if judged else ()
    return {
        family.format(k): (float(curve[k - 1]), 1.0) if k <= len(curve) else results.NOTHING
        for family, curve in curves.items()
        for k in range(1, total + 1)
    }


ROUNDING = 1e-9
"""Share of all responses' weight: totals closer than this are a tie."""


@lru_cache(maxsize=4096)
def pass_curve(num_samples: int, num_correct: int) -> tuple[float, ...]:
    """[K] unbiased pass@k for k = 1 to n = num_samples, of which num_correct are right (``metrics.pass_at_k``)."""
    return tuple(pass_at_k(num_samples, num_correct, k) for k in range(1, num_samples + 1))


def best_of_curve(scores: ArrayLike, rewards: ArrayLike) -> np.ndarray:
    """[K] the expected reward of the response with the highest score among k, ties broken at random.

    The response of rank r from the top (0 to n - 1) is the best of C(n - 1 - r, k - 1) of the C(n, k) subsets. Of
    responses with equal scores each is as likely to be chosen, so each counts with their mean reward.
    scores, rewards: [n].
    """
    _, tied_n, sizes = np.unique(-np.asarray(scores), return_inverse=True, return_counts=True)  # the highest first
    means = np.bincount(tied_n, weights=np.asarray(rewards)) / sizes
    return _shares_of_ranks(len(tied_n)) @ np.repeat(means, sizes)


def sample_circles(num_samples: int, subsets: int, rng: np.random.Generator) -> np.ndarray:
    """[C, n] permutations of the n responses, the orders whose windows votes are averaged over: as many as give at
    least ``subsets`` windows of each size. With the same ones, votes on a problem differ by their rule alone."""
    return rng.permuted(np.tile(np.arange(num_samples), (-(-subsets // num_samples), 1)), axis=1)


def vote_curve(
    answers: Sequence[Hashable | None], right: Sequence[bool], circles: np.ndarray, weights: ArrayLike | None = None
) -> np.ndarray:
    """[K] the probability that a vote of k is right, ties broken at random (``metrics.vote_success``).

    The answer with the most votes wins, or with ``weights`` the one with the largest total weight among those that
    have votes. None is an abstention: it is sampled but has no vote. An answer counts with the share of its responses
    that are right. weights: [n], at least 0, for example a reward model's scores.
    """
    n = circles.shape[1]
    weights_n = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
    numbers: dict[Hashable, int] = {}
    classes = [-1 if answer is None else numbers.setdefault(answer, len(numbers)) for answer in answers]
    votes_nA = (np.array(classes)[:, None] == np.arange(len(numbers))).astype(np.int32)
    right_A = np.asarray(right, dtype=np.float64) @ votes_nA / votes_nA.sum(axis=0)  # the share of each answer's
    if not right_A.any():
        return np.zeros(n)
    total = np.zeros(n)
    for order in circles:
        votes_KnA = _windows(votes_nA[order])
        if weights is None:
            leading = votes_KnA == votes_KnA.max(axis=2, keepdims=True)
        else:
            weight_KnA = _windows((votes_nA * weights_n[:, None])[order])
            leading = weight_KnA >= weight_KnA.max(axis=2, keepdims=True) - ROUNDING * weights_n.sum()
        leading &= votes_KnA > 0
        leaders_Kn = leading.sum(axis=2)
        wins_Kn = (leading @ right_A) / np.maximum(leaders_Kn, 1)
        total += wins_Kn.mean(axis=1)
    return total / len(circles)


def _windows(rows_nA: np.ndarray) -> np.ndarray:
    """[K, n, A] the sums of k neighbours in a circle, for k = 1 to n, from each of the n places on."""
    n = len(rows_nA)
    sums = np.concatenate([np.zeros_like(rows_nA[:1]), np.cumsum(np.concatenate([rows_nA, rows_nA]), axis=0)])
    starts = np.arange(n)
    return sums[starts[None, :] + np.arange(1, n + 1)[:, None]] - sums[starts][None]


@lru_cache(maxsize=64)
def _shares_of_ranks(n: int) -> np.ndarray:
    """[K, n] the share of the subsets of k whose best response has rank r; integers, divided once."""
    return np.array([[comb(n - 1 - r, k - 1) / comb(n, k) for r in range(n)] for k in range(1, n + 1)])


# --- as text ----------------------------------------------------------------------------------------------------------


def families(evaluation: results.Evaluation) -> dict[str, list[int]]:
    """Each curve, as its name with {} for k, and the k that it was measured at."""
    found: dict[str, list[int]] = {}
    for name in filter(evaluation.has, evaluation.metrics):
        if match := re.fullmatch(r"(.*?@)(\d+)(.*)", name):
            found.setdefault(f"{match[1]}{{}}{match[3]}", []).append(int(match[2]))
    return found


def table(evaluations: Mapping[str, results.Evaluation], *, resamples: int, seed: int) -> str:
    """One block for each arm, in at most 100 columns: its plain metrics, and its curves with intervals under them."""
    blocks = []
    for label, evaluation in evaluations.items():
        found = evaluation.intervals(resamples=resamples, seed=seed)
        lines = [f"{label}: {len(evaluation.problems)} problems, temperature {evaluation.temperature:g}"]
        for name, one in ((name, found[name]) for name in PLAIN if name in found):
            ends = f"[{_number(one.low)}, {_number(one.high)}]"
            lines.append(f"  {results.metric_name(name):<38}{_number(one.mean)}  {ends}")
        if evaluation.has(results.JUDGE_AND_RULES[0]):
            lines.append(f"  {'Cohen’s kappa of judge and rules':<38}{kappa(evaluation):.3f}")
        curves = families(evaluation)
        largest = max((k for measured in curves.values() for k in measured), default=1)
        powers = [2**power for power in range(largest.bit_length()) if 2**power < largest]
        sizes = [*powers, largest][-COLUMNS:]  # as many of the largest as fit on a line
        lines.append(_line("of k responses", [f"k={k}" for k in sizes]))
        for family in curves:
            cells = [found.get(family.format(k)) for k in sizes]
            lines.append(_line(family.format("k"), [one and _number(one.mean) for one in cells]))
            if not family.startswith("tokens@"):
                lines.append(_line("", [one and results.short_interval(one) for one in cells]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def kappa(evaluation: results.Evaluation) -> float:
    """Cohen's kappa of judge and rules, from the totals over problems."""
    same, judge, rules = (round(evaluation.metrics[name][0].sum()) for name in results.JUDGE_AND_RULES)
    compared = round(evaluation.metrics[results.JUDGE_AND_RULES[0]][1].sum())
    both = (judge + rules - (compared - same)) // 2
    return cohen_kappa(both, judge - both, rules - both, compared - judge - rules + both)


def differences(
    evaluations: Mapping[str, results.Evaluation], baseline: str, *, resamples: int, seed: int
) -> tuple[Tested, ...]:
    """Every other arm against the baseline. Raises UserError where two answered different problems."""
    results.require_same_problems(evaluations)
    base, tests = evaluations[baseline], []
    for label, evaluation in evaluations.items():
        curves = [family.format(max(sizes)) for family, sizes in families(evaluation).items()]
        for metric in [*COMPARED, *curves] if label != baseline else ():
            # Tokens are a cost, and the oracle's best of k equals pass@k.
            is_tested = not metric.startswith("tokens@") and not metric.endswith(f"/{ORACLE}")
            if not (is_tested and evaluation.has(metric) and base.has(metric)):
                continue
            ours, theirs = evaluation.metrics[metric], base.metrics[metric]
            size = max(resamples, FEWEST_PATTERNS)
            interval, p = results.paired_interval(metric, ours, theirs, resamples=size, seed=seed)
            tests.append(Tested(label, metric, interval, p))
    adjusted = holm([one.p for one in tests])
    return tuple(replace(one, p=float(p)) for one, p in zip(tests, adjusted, strict=True))


def differences_table(tested: tuple[Tested, ...], baseline: str) -> str:
    lines = [
        f"differences from {baseline} on the same problems, with the 95 % interval, the least difference that would be",
        f"found with probability 0.8, and p, adjusted for {len(tested)} tests:",
    ]
    for one in tested:
        interval = f"{one.interval.mean:+.4f} [{one.interval.low:+.4f}, {one.interval.high:+.4f}]"
        name = results.metric_name(one.metric)
        lines.append(f"  {one.arm:<24} {name:<34} {interval}  {one.detectable:.4f}  p = {one.p:.3g}")
    return "\n".join(lines)


def _line(label: str, cells: list[str | None]) -> str:
    return (f"  {label:<{LABEL_WIDTH}}" + "".join(f"{cell or '-':>{CELL_WIDTH}}" for cell in cells)).rstrip()


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
