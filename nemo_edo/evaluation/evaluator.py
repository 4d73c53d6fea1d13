"""Evaluation of a policy on the test problems: accuracy greedy and voted, pass@k, diversity, entropy.

Its responses are arrays, just generated or read back from a run's folder. Every number of sampled responses is at one
stated temperature: that of the sampling, and of the distributions whose entropy it is.

Dimensions: P problems in the order of the requests, N responses to each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nemo_edo.config import EvaluationConfig
from nemo_edo.data.batching import build_batch, minibatches
from nemo_edo.errors import UserError
from nemo_edo.evaluation import results
from nemo_edo.interfaces import Policy
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n, pass_at_k, pooled_distinct, vote_success
from nemo_edo.rollouts.store import Key, RolloutStore, StepScores, tokens_checksum
from nemo_edo.types import (
    ABSTAINED,
    RULES_AGREE,
    RULES_DISAGREE,
    GenerationRequest,
    Problem,
    SamplingParams,
    ScoredRollout,
)

_COLUMNS = (
    *("problem_id", "sample_index", "response_ids", "response_logprobs", "reward", "success_at", "finished"),
    *("answer", "well_formed", "reason"),
)


@dataclass(frozen=True)
class Samples:
    """P problems with N responses each, in the order of their sample_index: arrays [P, N]."""

    problems: tuple[str, ...]
    rewards: np.ndarray
    successes: np.ndarray
    """The responses that count as right (``ScoredRollout.success``)."""
    has_verdict: np.ndarray
    """False where the verifier abstained: such a response's reward says nothing."""
    rules: np.ndarray
    """1 or 0 what the rules say where a judge's verdict was compared with theirs; -1 elsewhere."""
    answers: np.ndarray
    """The answers in canonical form; None: there is none."""
    well_formed: np.ndarray
    tokens: np.ndarray
    """The token ids of each response, the stop token included."""
    lengths: np.ndarray
    logprobs: np.ndarray
    """The sum of a response's log-probabilities under the sampler; NaN where it told none."""

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
            return np.fromiter(values, dtype, len(values)).reshape(-1, each)

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
        """Checksum by which scores name these responses (``rollouts_checksum``)."""
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
    ids = table["problem_id"].to_pylist()
    problems = {problem: number for number, problem in enumerate(dict.fromkeys(ids))}
    numbers = np.fromiter((problems[problem] for problem in ids), np.int64, len(ids))
    if not problems:
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
        names.update(results.OF_ANSWERS)
    return names


def plain_metrics(sampled: Samples, each: int, greedy: Samples | None = None) -> list[results.Sums]:
    """Accuracy, reward, diversity, form and length of each problem's responses.

    What is measured among ``each`` of them is averaged over the N / ``each`` sets. Verdicts are counted where a judge
    did not abstain. entropy_sampled (nats) is minus the mean log-probability of the sampled tokens under their sampler,
    whose expectation is the mean entropy; distinct_4_pooled is ``pooled_distinct``.
    """
    size = sampled.rewards.shape[1]
    pooled = zip(*(values.tolist() for values in pooled_distinct(sampled.tokens)), strict=True)
    rows: list[results.Sums] = []
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
            results.POOLED: of_pool,
            results.SAMPLED_ENTROPY: results.NOTHING if np.isnan(entropy) else (entropy, length),
        }
        if greedy is not None:
            [judged], [success] = greedy.has_verdict[place], greedy.successes[place]
            row = {"greedy_accuracy": (float(success), 1.0) if judged else results.NOTHING, **row}
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
        found.append((sum(means) / len(means), 1.0) if means else results.NOTHING)
    return found


FEW_WELL_FORMED = 0.05
"""An evaluation with a smaller share of responses that state an answer as asked measures the form, not the skill."""


@dataclass(frozen=True)
class Tuning:
    """What the temperatures are compared on: training problems, and one rollout of requests to them."""

    problems: Sequence[Problem]
    requests: Sequence[GenerationRequest]


Respond = Callable[[str, Sequence[GenerationRequest], SamplingParams, Sequence[Problem]], list[ScoredRollout]]
"""(kind of responses, one of ``results.kinds``; requests; sampling; their problems) -> one scored response per request,
in order."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the current policy behind ``respond``. Sampling is over the whole vocabulary."""

    policy: Policy | None
    """The policy, to compute entropies; None: it is behind a server, and they are estimated."""
    respond: Respond
    problems: Sequence[Problem]
    config: EvaluationConfig
    max_new_tokens: int
    pad_id: int

    def evaluate(
        self, arm: str, requests: Sequence[GenerationRequest], rollouts: int, tuning: Tuning | None = None
    ) -> tuple[results.Evaluation, list[ScoredRollout]]:
        """``requests``: for each problem in order, ``rollouts`` x ``config.samples`` of them, answered at every
        temperature of the config.

        Metrics, each a sum and a count for each problem:
        greedy_accuracy (one greedy response); accuracy (share of sampled responses that are right); reward (their mean
        reward, where rewards are graded: where some reward is not 1 for a success or 0 for a failure); vote@N
        (``vote_success`` of N = ``config.samples`` responses, averaged over rollouts); pass@k (unbiased,
        over all samples; the largest k is the best of all samples); distinct_4, distinct_answers and answer_entropy
        (nats; each among a problem's N responses, averaged over rollouts); distinct_4_pooled (among all responses to
        all problems, ``pooled_distinct``); entropy (exact, mean over the response
        positions of the first rollout), or without a policy entropy_sampled (minus the mean log-probability of the
        sampled tokens, whose expectation it is); well_formed; response_length (tokens). Where a judge abstained on a
        response, accuracies, votes and pass@k leave it out, and "abstained" is the share of those. Where no response
        states an answer, there is no vote@N, nor what is measured among answers, nor a best temperature.

        At the config's first temperature they have these names, at the others NAME/t0.7 and so on. With ``tuning``,
        those at the temperature whose votes are best on its problems have ``results.AT_BEST``'s, too, and
        "best_temperature" is that temperature.

        Returns the evaluation and the first rollout's scored responses at the first temperature, for the report's
        examples.
        """
        each, (main, *others) = self.config.samples, self.config.temperature
        greedy = Samples.of_scored(self._scored(results.GREEDY, requests[:: rollouts * each], 0.0, self.problems), 1)
        rows, sampled, scored = self._measured(requests, main, rollouts, greedy)
        first = [item for responses in minibatches(scored, rollouts * each) for item in responses[:each]]
        measured, everything = {main: rows}, [greedy, sampled]
        for temperature in others:
            measured[temperature], sampled, _ = self._measured(requests, temperature, rollouts, None)
            everything.append(sampled)
        named = [(f"/t{temperature:g}", measured[temperature]) for temperature in others]
        unneeded = meaningless(*everything)
        has_answers = not unneeded.issuperset(results.OF_ANSWERS)
        if tuning is not None and has_answers:
            means = self.tuned(tuning)
            best = max(measured, key=means.get)  # the first of equals
            named += [(results.AT_BEST, measured[best]), ("", [{results.BEST_TEMPERATURE: (best, 1.0)}] * len(rows))]
        # Of another temperature all but the greedy accuracy is kept, and pass@k of the largest k alone.
        left_out = {"greedy_accuracy", *(f"pass@{k}" for k in range(1, each))}
        for suffix, others_rows in named:
            rows = [
                row | {name + suffix: value for name, value in other.items() if name not in left_out}
                for row, other in zip(rows, others_rows, strict=True)
            ]
        formed = sum(one.well_formed.sum() for one in everything) / sum(one.well_formed.size for one in everything)
        if formed < FEW_WELL_FORMED:
            warnings.warn(
                f"{arm}: {formed:.1%} of the responses state an answer in the form that the scorer reads. Likely "
                "causes: another form than data.answer_format (flexible also takes the last number), data.prompt, a "
                "chat template that is missing or not this model's (data.chat_template), or responses that are cut "
                "(sampling.max_new_tokens)",
                stacklevel=2,
            )
        unneeded |= set() if has_answers else {f"vote@{each}"}
        rows = [{name: sums for name, sums in row.items() if results.plain_name(name) not in unneeded} for row in rows]
        about = {"temperature": main, "samples": each}
        return results.Evaluation.of_rows(arm, [problem.id for problem in self.problems], rows, **about), first

    def tuned(self, tuning: Tuning) -> dict[float, float]:
        """Each temperature's mean vote over N = ``config.samples`` responses to the tuning problems."""
        means = {}
        for temperature in self.config.temperature:
            kind = results.kind_at(temperature, self.config, tuning=True)
            scored = self._scored(kind, tuning.requests, temperature, tuning.problems)
            found = votes(Samples.of_scored(scored, self.config.samples), self.config.samples)
            sums, counts = map(math.fsum, zip(*found, strict=True))
            means[temperature] = sums / counts if counts else 0.0  # a judge may have abstained on all of them
        return means

    def _measured(
        self, requests: Sequence[GenerationRequest], temperature: float, rollouts: int, greedy: Samples | None
    ) -> tuple[list[results.Sums], Samples, list[ScoredRollout]]:
        each = self.config.samples
        scored = self._scored(results.kind_at(temperature, self.config), requests, temperature, self.problems)
        sampled = Samples.of_scored(scored, rollouts * each)
        rows = plain_metrics(sampled, each, greedy)
        if self.policy is not None:  # the exact entropy of each problem's responses in the first rollout
            of_problem = minibatches(scored, rollouts * each)
            first = [item.rollout for responses in of_problem for item in responses[:each]]
            batch = build_batch([(one.prompt_ids, one.response_ids) for one in first], pad_id=self.pad_id)
            _, entropies = self.policy.logprobs(batch, temperature=temperature)
            sums = (entropies * batch.mask).sum(dim=1).reshape(-1, each).sum(dim=1)
            counts = batch.mask.sum(dim=1).reshape(-1, each).sum(dim=1)
            for row, pair in zip(rows, zip(sums.tolist(), counts.tolist(), strict=True), strict=True):
                del row[results.SAMPLED_ENTROPY]
                row["entropy"] = pair
        for row, vote in zip(rows, votes(sampled, each), strict=True):
            row[f"vote@{each}"] = vote
            correct, judged = map(int, row["accuracy"])
            for k in range(1, each + 1):
                row[f"pass@{k}"] = (pass_at_k(judged, correct, k), 1.0) if k <= judged else results.NOTHING
        return rows, sampled, scored

    def _scored(
        self, kind: str, requests: Sequence[GenerationRequest], temperature: float, problems: Sequence[Problem]
    ) -> list[ScoredRollout]:
        return self.respond(kind, requests, SamplingParams(temperature, 1.0, self.max_new_tokens), problems)
