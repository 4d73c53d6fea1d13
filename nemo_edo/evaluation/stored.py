"""From one sampling pass, many answers: what k responses are worth, computed from stored ones without a model.

The curves are means over all subsets of k of a problem's N responses (``test_time.curves``). A response that a judge
gave no verdict on is left out of every count: a problem's curve ends at the number of its responses with a verdict.

Dimensions: P problems, N responses to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.evaluation.problem_metrics import ProblemResponses, plain_metrics
from nemo_edo.evaluation.results import JUDGE_AND_RULES, NOTHING, POOLED, SAMPLED_ENTROPY, Evaluation, Sums
from nemo_edo.metrics import pooled_distinct
from nemo_edo.rollouts.arrays import Samples
from nemo_edo.test_time.best_of_n import aggregate_steps
from nemo_edo.test_time.curves import Circles, best_of_curve, pass_curve, vote_curve

ORACLE = "oracle"
"""The score that knows the reward."""
Scores = Mapping[str, np.ndarray]
"""name -> [P, N], one score for each response; best-of-k takes the highest."""


def aggregated(name: str, steps: Sequence[Sequence[Sequence[float]]], how: str) -> np.ndarray:
    """[P, N] one score for each response from those of its steps (``aggregate_steps``). Raises UserError for scores
    that ``how`` does not take."""
    try:
        return np.array([[aggregate_steps(response, how) for response in problem] for problem in steps])
    except ValueError as error:
        raise UserError(f"evaluation.aggregation is {how}, which the scores {name} do not fit: {error}") from error


def weighs(scores_PN: np.ndarray) -> bool:
    """Whether the scores can be weights of votes: numbers below 0 cannot."""
    return bool((scores_PN >= 0).all())


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
) -> Evaluation:
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
    of_all = pooled_distinct(sampled.responses(place) for place in range(len(sampled.problems)))
    rows = [
        {
            **_plain(greedy, sampled, place, each),
            POOLED: (float(of_all[0][place]), float(of_all[1][place])),
            **_curves(sampled, place, {name: scores_PN[place] for name, scores_PN in scores.items()}, subsets, seed),
        }
        for place in range(len(sampled.problems))
    ]
    weighing = {name for name, scores_PN in scores.items() if weighs(scores_PN)}
    unneeded = {name for name in rows[0] if name.startswith("weighted@") and name.partition("/")[2] not in weighing}
    if sampled.has_verdict.all() and greedy.has_verdict.all():
        unneeded.add("abstained")
    if (sampled.rewards == sampled.successes).all():
        unneeded.add("reward")
    if (sampled.rules < 0).all():
        unneeded.update(JUDGE_AND_RULES)
    kept_rows = [{name: pair for name, pair in row.items() if name not in unneeded} for row in rows]
    return Evaluation.of_rows(arm, sampled.problems, kept_rows, temperature=temperature)


def _plain(greedy: Samples, sampled: Samples, place: int, each: int) -> Sums:
    of_greedy = float(greedy.successes[place, 0]) if greedy.has_verdict[place, 0] else math.nan
    columns = (sampled.rewards, sampled.successes, sampled.has_verdict, sampled.well_formed, sampled.answers)
    found = ProblemResponses(*(column[place] for column in columns), sampled.responses(place), of_greedy)
    return {
        **plain_metrics(found, each),
        SAMPLED_ENTROPY: (-float(sampled.logprobs[place].sum()), float(sampled.lengths[place].sum())),
        **_judge_and_rules(sampled.rewards[place], sampled.rules[place]),
    }


def _judge_and_rules(rewards: np.ndarray, rules: np.ndarray) -> Sums:
    compared = rules >= 0
    judge, rules = rewards[compared] == 1, rules[compared] == 1
    counts = ((judge == rules).sum(), judge.sum(), rules.sum())
    return {name: (float(c), float(compared.sum())) for name, c in zip(JUDGE_AND_RULES, counts, strict=True)}


def _curves(sampled: Samples, place: int, scores: Mapping[str, np.ndarray], subsets: int, seed: int) -> Sums:
    with_verdict = np.flatnonzero(sampled.has_verdict[place])
    right, answers = sampled.successes[place, with_verdict], sampled.answers[place, with_verdict].tolist()
    total, rewards = len(sampled.has_verdict[place]), right.astype(np.float64)
    curves: dict[str, np.ndarray] = {"tokens@{}": sampled.lengths[place].mean() * np.arange(1, total + 1)}
    empty = np.zeros(0)
    curves["pass@{}"] = curves["majority@{}"] = curves[f"best_of@{{}}/{ORACLE}"] = empty
    for name in scores:
        curves[f"best_of@{{}}/{name}"] = curves[f"weighted@{{}}/{name}"] = empty
    if with_verdict.size:
        circles = Circles.sample(with_verdict.size, subsets, np.random.default_rng([seed, place]))
        curves["pass@{}"] = pass_curve(with_verdict.size, int(right.sum()))
        curves["majority@{}"] = vote_curve(answers, right, circles)
        curves[f"best_of@{{}}/{ORACLE}"] = best_of_curve(rewards, rewards)
        for name, all_scores in scores.items():
            own = all_scores[with_verdict]
            curves[f"best_of@{{}}/{name}"] = best_of_curve(own, rewards)
            if weighs(own):
                curves[f"weighted@{{}}/{name}"] = vote_curve(answers, right, circles, own)
    return {
        family.format(k): (float(curve[k - 1]), 1.0) if k <= len(curve) else NOTHING
        for family, curve in curves.items()
        for k in range(1, total + 1)
    }
