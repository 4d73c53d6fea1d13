"""From one sampling pass, many answers: what k responses are worth, computed from stored ones without a model.

The curves are means over all subsets of k of a problem's N responses (``test_time.curves``). A response that a judge
gave no verdict on is left out of every count: a problem's curve ends at the number of its responses with a verdict.

Dimensions: P problems, N responses to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import JUDGE_AND_RULES, NOTHING, POOLED, SAMPLED_ENTROPY, Evaluation, Sums
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n, pooled_distinct
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


def is_graded(rewards: np.ndarray, successes: np.ndarray) -> bool:
    """Whether rewards say more than which responses are successes."""
    return bool((rewards != successes).any())


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
    """The stored responses' plain metrics and curves, problem by problem.

    greedy_accuracy; accuracy; well_formed; response_length; entropy_sampled (nats): minus the mean log-probability of
    the sampled tokens under their sampler, whose expectation is the mean entropy; distinct_4, distinct_answers and
    answer_entropy among ``each`` responses, averaged over a problem's N / ``each`` sets of them; distinct_4_pooled,
    among all responses to all problems (``pooled_distinct``). Then, for every k from
    1 to N: pass@k; majority@k; best_of@k/NAME and weighted@k/NAME of each score (weighted: where none is below 0), and
    best_of@k/oracle of the success itself; tokens@k, the mean number of tokens of k responses.

    Where rewards are graded: reward, their mean. Where the rules were applied along with a judge: judge_agreement, the
    share on which they are the same, and the accuracy by each. Where a judge abstained: abstained, the share of those.

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
    kept = [name for name in rows[0] if not name.startswith("weighted@") or name.partition("/")[2] in weighing]
    if sampled.has_verdict.all() and greedy.has_verdict.all():
        kept.remove("abstained")
    if not is_graded(sampled.rewards, sampled.successes):
        kept.remove("reward")
    if (sampled.rules < 0).all():
        kept = [name for name in kept if name not in JUDGE_AND_RULES]
    kept_rows = [{name: row[name] for name in kept} for row in rows]
    return Evaluation.of_rows(arm, sampled.problems, kept_rows, temperature=temperature)


def _plain(greedy: Samples, sampled: Samples, place: int, each: int) -> Sums:
    with_verdict, rewards = sampled.has_verdict[place], sampled.rewards[place]
    successes = sampled.successes[place]
    answers, lengths = sampled.answers[place], sampled.lengths[place]
    total, tokens = len(rewards), sampled.responses(place)
    sets = [slice(start, start + each) for start in range(0, total, each)]

    def over_sets(values: list[float]) -> tuple[float, float]:
        return sum(values) / len(values), 1.0

    greedy_verdict = float(greedy.has_verdict[place, 0])
    return {
        "greedy_accuracy": (float(greedy.successes[place, 0]) * greedy_verdict, greedy_verdict),
        "accuracy": (float(successes[with_verdict].sum()), float(with_verdict.sum())),
        "reward": (float(rewards[with_verdict].sum()), float(with_verdict.sum())),
        "distinct_4": over_sets([distinct_n(tokens[one], n=4) for one in sets]),
        "distinct_answers": over_sets([float(distinct_answers(answers[one])) for one in sets]),
        "answer_entropy": over_sets([answer_entropy(answers[one]) for one in sets]),
        SAMPLED_ENTROPY: (-float(sampled.logprobs[place].sum()), float(lengths.sum())),
        "well_formed": (float(sampled.well_formed[place].sum()), float(total)),
        "response_length": (float(lengths.sum()), float(total)),
        "abstained": (float((~with_verdict).sum() + 1 - greedy_verdict), float(total + 1)),
        **_judge_and_rules(rewards, sampled.rules[place]),
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
