"""From one sampling pass, many answers: what k responses are worth, computed from stored ones without a model.

The curves are means over all subsets of k of a problem's N responses (``test_time.curves``). A response that a judge
gave no verdict on is left out of every count: a curve of a problem goes up to the number of its judged responses only.

Dimensions: P problems, N responses to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_edo.data.stored_samples import Samples
from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.evaluation.run import SAMPLED_ENTROPY, Sums
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n
from nemo_edo.test_time.best_of_n import aggregate_steps
from nemo_edo.test_time.curves import Circles, best_of_curve, pass_curve, vote_curve

ORACLE = "oracle"
"""The score that knows the reward."""
BESIDE_RULES = ("judge_agreement", "accuracy_by_judge", "accuracy_by_rules")
"""Over the responses that both a judge and the rules compared."""
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
    arm: str, greedy: Samples, sampled: Samples, scores: Scores, *, each: int, subsets: int, seed: int
) -> Evaluation:
    """The stored responses' plain metrics and curves, problem by problem.

    greedy_accuracy; accuracy; well_formed; response_length; entropy_sampled (nats): minus the mean log-probability of
    the sampled tokens under their sampler, whose expectation is the mean entropy; distinct_4, distinct_answers and
    answer_entropy among ``each`` responses, averaged over a problem's N / ``each`` sets of them. Then, for every k from
    1 to N: pass@k; majority@k; best_of@k/NAME and weighted@k/NAME of each score (weighted: where none is below 0), and
    best_of@k/oracle of the reward itself; tokens@k, the mean number of tokens of k responses.

    Where a judge's verdicts stand beside the rules': judge_agreement, the share on which they are the same, and the
    accuracy by each. Where a judge abstained: abstained, the share of those.

    subsets: that a vote's expectation at a k is estimated from, at least; ``seed`` fixes them, the same ones for a
    problem's place in every arm. Raises UserError for greedy and sampled responses to different problems, and for an N
    that is no multiple of ``each``.
    """
    if greedy.problems != sampled.problems:
        raise UserError(f"{arm}: the stored greedy and sampled responses answer different problems; evaluate it again")
    total = sampled.rewards.shape[1]
    if total % each:
        raise UserError(
            f"{arm}: {total} responses to each problem are stored, which evaluation.samples={each} does not divide; "
            "give the evaluation.samples that they were drawn with"
        )
    rows = [
        {
            **_plain(greedy, sampled, place, each),
            **_curves(sampled, place, {name: scores_PN[place] for name, scores_PN in scores.items()}, subsets, seed),
        }
        for place in range(len(sampled.problems))
    ]
    weighing = {name for name, scores_PN in scores.items() if weighs(scores_PN)}
    kept = [name for name in rows[0] if not name.startswith("weighted@") or name.partition("/")[2] in weighing]
    if sampled.judged.all() and greedy.judged.all():
        kept.remove("abstained")
    if (sampled.rules < 0).all():
        kept = [name for name in kept if name not in BESIDE_RULES]
    return Evaluation(
        arm,
        sampled.problems,
        {name: (np.array([row[name][0] for row in rows]), np.array([row[name][1] for row in rows])) for name in kept},
    )


def _plain(greedy: Samples, sampled: Samples, place: int, each: int) -> Sums:
    judged, rewards = sampled.judged[place], sampled.rewards[place]
    answers, lengths = sampled.answers[place], sampled.lengths[place]
    total, tokens = len(rewards), sampled.responses(place)
    sets = [slice(start, start + each) for start in range(0, total, each)]

    def over_sets(values: list[float]) -> tuple[float, float]:
        return sum(values) / len(values), 1.0

    greedy_judged = float(greedy.judged[place, 0])
    return {
        "greedy_accuracy": (float(greedy.rewards[place, 0]) * greedy_judged, greedy_judged),
        "accuracy": (float(rewards[judged].sum()), float(judged.sum())),
        "distinct_4": over_sets([distinct_n(tokens[one], n=4) for one in sets]),
        "distinct_answers": over_sets([float(distinct_answers(answers[one])) for one in sets]),
        "answer_entropy": over_sets([answer_entropy(answers[one]) for one in sets]),
        SAMPLED_ENTROPY: (-float(sampled.logprobs[place].sum()), float(lengths.sum())),
        "well_formed": (float(sampled.well_formed[place].sum()), float(total)),
        "response_length": (float(lengths.sum()), float(total)),
        "abstained": (float((~judged).sum() + 1 - greedy_judged), float(total + 1)),
        **_beside_rules(rewards, sampled.rules[place]),
    }


def _beside_rules(rewards: np.ndarray, rules: np.ndarray) -> Sums:
    compared = rules >= 0
    judge, rules = rewards[compared] == 1, rules[compared] == 1
    counts = ((judge == rules).sum(), judge.sum(), rules.sum())
    return {name: (float(c), float(compared.sum())) for name, c in zip(BESIDE_RULES, counts, strict=True)}


def _curves(sampled: Samples, place: int, scores: Mapping[str, np.ndarray], subsets: int, seed: int) -> Sums:
    judged = np.flatnonzero(sampled.judged[place])
    rewards, answers = sampled.rewards[place, judged], sampled.answers[place, judged].tolist()
    total, right = len(sampled.judged[place]), rewards == 1
    curves: dict[str, np.ndarray] = {"tokens@{}": sampled.lengths[place].mean() * np.arange(1, total + 1)}
    empty = np.zeros(0)
    curves["pass@{}"] = curves["majority@{}"] = curves[f"best_of@{{}}/{ORACLE}"] = empty
    for name in scores:
        curves[f"best_of@{{}}/{name}"] = curves[f"weighted@{{}}/{name}"] = empty
    if judged.size:
        circles = Circles.drawn(judged.size, subsets, np.random.default_rng([seed, place]))
        curves["pass@{}"] = pass_curve(judged.size, int(right.sum()))
        curves["majority@{}"] = vote_curve(answers, right, circles)
        curves[f"best_of@{{}}/{ORACLE}"] = best_of_curve(rewards, rewards)
        for name, all_scores in scores.items():
            own = all_scores[judged]
            curves[f"best_of@{{}}/{name}"] = best_of_curve(own, rewards)
            if weighs(own):
                curves[f"weighted@{{}}/{name}"] = vote_curve(answers, right, circles, own)
    return {
        family.format(k): (float(curve[k - 1]), 1.0) if k <= len(curve) else (0.0, 0.0)
        for family, curve in curves.items()
        for k in range(1, total + 1)
    }
