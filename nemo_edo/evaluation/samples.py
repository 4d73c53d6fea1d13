"""An evaluation's responses as arrays, just generated or read back from a run's folder, and the metrics of each problem
that need no model.

Dimensions: P problems in the order of the requests, N responses to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import NOTHING, OF_ANSWERS, POOLED, SAMPLED_ENTROPY, Sums
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n, pooled_distinct, vote_success
from nemo_edo.rollouts.score_store import Key, StepScores, tokens_checksum
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE, ScoredRollout

_COLUMNS = (
    *("problem_id", "sample_index", "response_ids", "response_logprobs", "reward", "success_at", "finished"),
    *("answer", "well_formed", "reason"),
)


@dataclass(frozen=True)
class Samples:
    problems: tuple[str, ...]
    rewards: np.ndarray
    successes: np.ndarray
    """[P, N] bool, the responses that count as right (``ScoredRollout.success``)."""
    has_verdict: np.ndarray
    """[P, N] bool, False where the verifier abstained: such a response's reward says nothing."""
    rules: np.ndarray
    """[P, N] int8: 1 or 0 what the rules say where a judge's verdict was compared with theirs; -1 elsewhere."""
    answers: np.ndarray
    """[P, N] objects, the answers in canonical form; None: there is none."""
    well_formed: np.ndarray
    tokens: np.ndarray
    """[P, N] objects, the token ids of each response, the stop token included."""
    lengths: np.ndarray
    """[P, N] int64, their numbers."""
    logprobs: np.ndarray
    """[P, N] float64, the sum of a response's log-probabilities under the sampler; NaN where it told none."""

    @classmethod
    def of(cls, responses: Iterable[tuple], each: int) -> Samples:
        """responses: (problem_id, reward, success, reason, answer, well_formed, token ids, log-probabilities), ``each``
        of every problem. Raises ValueError where one has log-probabilities, but not one for each token."""
        problems, rewards, successes, reasons, answers, well_formed, tokens, logprobs = zip(*responses, strict=True)
        lengths, told = ([len(one) for one in values] for values in (tokens, logprobs))
        if any(told) and told != lengths:
            raise ValueError("has responses without a log-probability of each token")
        sums = [float(np.sum(one, dtype=np.float64)) for one in logprobs] if any(told) else [math.nan] * len(told)
        rules = [
            reward == 1 if reason.endswith(RULES_AGREE) else reward != 1 if reason.endswith(RULES_DISAGREE) else -1
            for reward, reason in zip(rewards, reasons, strict=True)
        ]

        def grid(values: Sequence[Any], dtype: type) -> np.ndarray:
            return pd.Series(values, dtype=dtype).to_numpy().reshape(-1, each)

        return cls(
            problems=problems[::each],
            rewards=grid(rewards, float),
            successes=grid(successes, bool),
            has_verdict=grid([not reason.startswith(ABSTAINED) for reason in reasons], bool),
            rules=grid(rules, np.int8),
            answers=grid(answers, object),
            well_formed=grid(well_formed, bool),
            tokens=grid(tokens, object),
            lengths=grid(lengths, np.int64),
            logprobs=grid(sums, float),
        )

    @classmethod
    def of_scored(cls, scored: Sequence[ScoredRollout], each: int) -> Samples:
        """Responses in the order of their requests, ``each`` to a problem."""
        return cls.of(
            ((one.rollout.problem_id, one.reward, one.success, one.reason, one.answer, one.well_formed,
              one.rollout.response_ids, one.rollout.response_logprobs) for one in scored),
            each,
        )  # fmt: skip

    @property
    def checksum(self) -> str:
        """What scores of these responses name them by (``score_store.rollouts_checksum``)."""
        named = zip(self.problems, self.tokens, strict=True)
        return tokens_checksum((problem, place, ids) for problem, row in named for place, ids in enumerate(row))

    def steps(self, scores: dict[Key, StepScores]) -> list[list[tuple[float, ...]]]:
        """The scores of the steps of each problem's responses. Raises UserError where a response has none."""
        try:
            return [
                [scores[problem, sample].steps for sample in range(self.rewards.shape[1])] for problem in self.problems
            ]
        except KeyError as error:
            problem, sample = error.args[0]
            raise UserError(f"response {sample} to {problem} has no score; score the run again") from None


def read_samples(store: RolloutStore, iteration: int) -> Samples:
    """The responses of one evaluation. Raises UserError as ``RolloutStore.read`` does, and unless every problem has the
    same number of responses, each once."""
    table, place = store.read_table(iteration, _COLUMNS), f"{store.folder}: iteration {iteration}"
    numbers, problems = pd.factorize(np.array(table["problem_id"].to_pylist(), dtype=object))
    if not len(problems):
        raise UserError(f"{place} has no responses")
    indices, each = table["sample_index"].to_numpy(), len(numbers) // len(problems)
    order = np.lexsort((indices, numbers))
    expected = np.divmod(np.arange(len(numbers)), each)
    if not np.array_equal((numbers[order], indices[order]), expected):
        raise UserError(
            f"{place} has {len(numbers)} responses to {len(problems)} problems, expected samples 0 to N - 1 of each; "
            "evaluate the run again"
        )
    table = table.take(pa.array(order))
    successes = pc.and_(table["finished"], pc.greater_equal(table["reward"], table["success_at"]))
    columns = (table["problem_id"], table["reward"], successes, table["reason"], table["answer"], table["well_formed"])
    lists = (table[name].to_numpy() for name in ("response_ids", "response_logprobs"))
    try:
        return Samples.of(zip(*(column.to_pylist() for column in columns), *lists, strict=True), each)
    except ValueError as error:
        raise UserError(f"{place} {error}") from error


def meaningless(*samples: Samples) -> set[str]:
    """The metrics that say nothing of any of these responses: of rewards that are not graded, of verdicts where none is
    missing, and of answers where there is none."""
    names = set()
    if all((one.rewards == one.successes).all() for one in samples):
        names.add("reward")
    if all(one.has_verdict.all() for one in samples):
        names.add("abstained")
    if all(answer is None for one in samples for answer in one.answers.flat):
        names.update(OF_ANSWERS)
    return names


def plain_metrics(sampled: Samples, each: int, greedy: Samples | None = None) -> list[Sums]:
    """Accuracy, reward, diversity, form and length of each problem's responses.

    What is measured among ``each`` of them is averaged over the N / ``each`` sets. Verdicts are counted where a judge
    did not abstain. entropy_sampled (nats) is minus the mean log-probability of the sampled tokens under their sampler,
    whose expectation is the mean entropy; distinct_4_pooled is ``pooled_distinct``.
    """
    size = sampled.rewards.shape[1]
    pooled = zip(*(values.tolist() for values in pooled_distinct(sampled.tokens)), strict=True)
    rows: list[Sums] = []
    for place, of_pool in enumerate(pooled):
        tokens, answers, has_verdict = sampled.tokens[place], sampled.answers[place], sampled.has_verdict[place]
        verdicts, entropy, length = has_verdict.sum(), -sampled.logprobs[place].sum(), sampled.lengths[place].sum()

        def over_sets(values: np.ndarray, measure: Callable[[np.ndarray], float]) -> tuple[float, float]:
            sets = [values[start : start + each] for start in range(0, size, each)]
            return sum(float(measure(one)) for one in sets) / len(sets), 1.0

        row = {
            "accuracy": (sampled.successes[place, has_verdict].sum(), verdicts),
            "reward": (sampled.rewards[place, has_verdict].sum(), verdicts),
            **{f"distinct_{n}": over_sets(tokens, lambda one, n=n: distinct_n(one, n)) for n in range(1, 5)},
            "distinct_answers": over_sets(answers, distinct_answers),
            "answer_entropy": over_sets(answers, answer_entropy),
            "well_formed": (sampled.well_formed[place].sum(), size),
            "response_length": (length, size),
            "abstained": (size - verdicts, size),
            POOLED: of_pool,
            SAMPLED_ENTROPY: NOTHING if np.isnan(entropy) else (entropy, length),
        }
        if greedy is not None:
            [judged], [success] = greedy.has_verdict[place], greedy.successes[place]
            row = {"greedy_accuracy": (float(success), 1.0) if judged else NOTHING, **row}
            row["abstained"] = (size - verdicts + (not judged), size + 1)
        rows.append(row)
    return rows


def votes(sampled: Samples, each: int) -> list[tuple[float, float]]:
    """``vote_success`` of ``each`` responses, for each problem averaged over its sets; without those that a judge
    abstained on."""
    found = []
    for place in range(len(sampled.problems)):
        means = []
        for start in range(0, sampled.rewards.shape[1], each):
            judged = start + np.flatnonzero(sampled.has_verdict[place, start : start + each])
            if len(judged):
                means.append(vote_success(sampled.answers[place, judged], sampled.successes[place, judged]))
        found.append((sum(means) / len(means), 1.0) if means else NOTHING)
    return found
