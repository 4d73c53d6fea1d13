"""Evaluation of a policy on the test problems: accuracy greedy and voted, pass@k, diversity, entropy.

Every number of sampled responses is at one stated temperature: that of the sampling, and of the distributions whose
entropy it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_edo.config import EvaluationConfig
from nemo_edo.data.batching import build_batch, minibatches
from nemo_edo.evaluation.problem_metrics import ProblemResponses, plain_metrics
from nemo_edo.evaluation.results import (
    AT_BEST,
    BEST_TEMPERATURE,
    GREEDY,
    NOTHING,
    POOLED,
    SAMPLED_ENTROPY,
    Evaluation,
    Sums,
    at_temperature,
    kind_at,
    plain_name,
)
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer
from nemo_edo.metrics import pass_at_k, pooled_distinct
from nemo_edo.test_time import expected_vote_score
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout


@dataclass(frozen=True)
class Tuning:
    """What the temperatures are compared on: training problems, and one rollout of requests to them."""

    problems: Sequence[Problem]
    requests: Sequence[GenerationRequest]


class Keeping:
    """Generates and scores an evaluation's responses; keeps none of them."""

    def responses(
        self,
        kind: str,
        requests: Sequence[GenerationRequest],
        engine: GenerationEngine,
        scorer: Scorer,
        sampling: SamplingParams,
        problems: Sequence[Problem],
    ) -> list[ScoredRollout]:
        """One scored response per request, in order. kind: one of ``results.kinds``."""
        return scorer.score(engine.generate(requests, sampling), problems)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the engine's current policy. Sampling is over the whole vocabulary."""

    policy: Policy | None
    """The engine's policy, to compute entropies; None: it is behind a server, and they are estimated."""
    engine: GenerationEngine
    scorer: Scorer
    problems: Sequence[Problem]
    prompts: Mapping[str, tuple[int, ...]]
    config: EvaluationConfig
    max_new_tokens: int
    pad_id: int
    keeping: Keeping = Keeping()
    """What keeps the responses."""

    def evaluate(
        self, arm: str, requests: Sequence[GenerationRequest], rollouts: int, tuning: Tuning | None = None
    ) -> tuple[Evaluation, list[ScoredRollout]]:
        """``requests``: for each problem in order, ``rollouts`` x ``config.samples`` of them, answered at every
        temperature of the config.

        Metrics, each a sum and a count for each problem:
        greedy_accuracy (one greedy response); accuracy (share of sampled responses that are right); reward (their mean
        reward, where rewards are graded: where some reward is not 1 for a success or 0 for a failure); vote@N (expected
        score of the majority vote over N = ``config.samples`` responses, averaged over rollouts); pass@k (unbiased,
        over all samples; the largest k is the best of all samples); distinct_4, distinct_answers and answer_entropy
        (nats; each among a problem's N responses, averaged over rollouts); distinct_4_pooled (among all responses to
        all problems, ``pooled_distinct``); entropy (exact, mean over the response
        positions of the first rollout), or without a policy entropy_sampled (minus the mean log-probability of the
        sampled tokens, whose expectation it is); well_formed; response_length (tokens). Where a judge abstained on a
        response, accuracies, votes and pass@k leave it out, and "abstained" is the share of those.

        At the config's first temperature they have these names, at the others ``results.at_temperature``'s. With
        ``tuning``, those at the temperature whose votes are best on its problems have ``results.AT_BEST``'s, too, and
        "best_temperature" is that temperature.

        Returns the evaluation and the first rollout's scored responses at the first temperature, for the report's
        examples.
        """
        samples = self.config.samples
        each = rollouts * samples
        main, *others = self.config.temperature
        greedy = self._scored(GREEDY, requests[::each], 0.0, self.problems)
        found = self._sampled(kind_at(main, self.config), requests, main)
        everything = [*greedy, *(item for responses in found for item in responses)]
        rows = self._rows(found, main, greedy, rollouts)
        measured = {main: rows}
        for temperature in others:
            again = self._sampled(kind_at(temperature, self.config), requests, temperature)
            everything += [item for responses in again for item in responses]
            measured[temperature] = self._rows(again, temperature, None, rollouts)
            rows = _joined(rows, self._main(measured[temperature]), at_temperature(temperature))
        if tuning is not None:
            best = max(measured, key=self.tuned(tuning).get)  # the first of equals
            rows = _joined(rows, self._main(measured[best]), AT_BEST)
            rows = [{**row, BEST_TEMPERATURE: (best, 1.0)} for row in rows]
        unneeded = {
            "abstained": all(item.has_verdict for item in everything),
            "reward": all(item.reward == item.success for item in everything),
        }
        rows = [{name: sums for name, sums in row.items() if not unneeded.get(plain_name(name))} for row in rows]
        first = [item for responses in found for item in responses[:samples]]
        return Evaluation.of_rows(arm, [problem.id for problem in self.problems], rows, temperature=main), first

    def tuned(self, tuning: Tuning) -> dict[float, float]:
        """Each temperature's mean vote over N = ``config.samples`` responses to the tuning problems."""
        vote, means = f"vote@{self.config.samples}", {}
        for temperature in self.config.temperature:
            kind = kind_at(temperature, self.config, tuning=True)
            scored = self._scored(kind, tuning.requests, temperature, tuning.problems)
            of_problem = minibatches(scored, self.config.samples)
            paired = zip(tuning.problems, of_problem, strict=True)
            votes = [_metrics(problem, [responses], None)[vote] for problem, responses in paired]
            sums, counts = map(math.fsum, zip(*votes, strict=True))
            means[temperature] = sums / counts if counts else 0.0  # a judge may have abstained on all of them
        return means

    def _sampled(
        self, kind: str, requests: Sequence[GenerationRequest], temperature: float
    ) -> list[list[ScoredRollout]]:
        """Each problem's responses."""
        scored = self._scored(kind, requests, temperature, self.problems)
        return minibatches(scored, len(requests) // len(self.problems))

    def _rows(
        self,
        of_problem: Sequence[Sequence[ScoredRollout]],
        temperature: float,
        greedy: Sequence[ScoredRollout] | None,
        rollouts: int,
    ) -> list[Sums]:
        samples = len(of_problem[0]) // rollouts
        first = [item for responses in of_problem for item in responses[:samples]]
        exact = self.policy is not None
        name = "entropy" if exact else SAMPLED_ENTROPY
        entropies = self._entropies(first, samples, temperature) if exact else _sampled_entropies(of_problem)
        of_all = pooled_distinct([item.rollout.response_ids for item in responses] for responses in of_problem)
        pooled = zip(*(values.tolist() for values in of_all), strict=True)
        columns = (self.problems, of_problem, greedy or [None] * len(of_problem), entropies, pooled)
        return [
            {**_metrics(problem, minibatches(responses, samples), answer), POOLED: distinct, name: entropy}
            for problem, responses, answer, entropy, distinct in zip(*columns, strict=True)
        ]

    def _main(self, rows: Sequence[Sums]) -> list[Sums]:
        """What is kept of another temperature: all but the greedy accuracy, and pass@k of the largest k alone."""
        left_out = {"greedy_accuracy", *(f"pass@{k}" for k in range(1, self.config.samples))}
        return [{name: value for name, value in row.items() if name not in left_out} for row in rows]

    def _scored(
        self, kind: str, requests: Sequence[GenerationRequest], temperature: float, problems: Sequence[Problem]
    ) -> list[ScoredRollout]:
        sampling = SamplingParams(temperature, 1.0, self.max_new_tokens)
        return self.keeping.responses(kind, requests, self.engine, self.scorer, sampling, problems)

    def _entropies(
        self, scored: Sequence[ScoredRollout], samples: int, temperature: float
    ) -> list[tuple[float, float]]:
        """(sum of entropies, tokens) of each problem's responses."""
        batch = build_batch([(s.rollout.prompt_ids, s.rollout.response_ids) for s in scored], pad_id=self.pad_id)
        _, entropies = self.policy.logprobs(batch, temperature=temperature)
        sums = (entropies * batch.mask).sum(dim=1).reshape(-1, samples).sum(dim=1)
        counts = batch.mask.sum(dim=1).reshape(-1, samples).sum(dim=1)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))


def _joined(rows: Sequence[Sums], others: Sequence[Sums], suffix: str) -> list[Sums]:
    """The rows with the metrics of other ones, their names with the suffix."""
    return [
        {**row, **{name + suffix: value for name, value in other.items()}}
        for row, other in zip(rows, others, strict=True)
    ]


def _sampled_entropies(of_problem: Sequence[Sequence[ScoredRollout]]) -> list[tuple[float, float]]:
    """(minus the sum of log-probabilities, tokens) of each problem's responses."""
    flat = [[value for item in responses for value in item.rollout.response_logprobs] for responses in of_problem]
    return [(-math.fsum(logprobs), float(len(logprobs))) for logprobs in flat]


def _metrics(problem: Problem, rollouts: Sequence[Sequence[ScoredRollout]], greedy: ScoredRollout | None) -> Sums:
    responses, samples = [item for rollout in rollouts for item in rollout], len(rollouts[0])
    columns = ("reward", "success", "has_verdict", "well_formed", "answer")
    rewards, successes, has_verdict, well_formed, answers = (
        [getattr(item, name) for item in responses] for name in columns
    )
    of_greedy = None if greedy is None else float(greedy.success) if greedy.has_verdict else math.nan
    tokens = [item.rollout.response_ids for item in responses]
    masks = (np.array(values, dtype=bool) for values in (successes, has_verdict, well_formed))
    found = plain_metrics(ProblemResponses(np.array(rewards, dtype=float), *masks, answers, tokens, of_greedy), samples)
    voting = [[item.answer for item in rollout if item.has_verdict] for rollout in rollouts]
    votes = [expected_vote_score(answers, problem.answer) for answers in voting if answers]
    judged, correct = sum(has_verdict), int(found["accuracy"][0])
    return {
        **found,
        f"vote@{samples}": (sum(votes) / len(votes), 1.0) if votes else NOTHING,
        **{
            f"pass@{k}": (pass_at_k(judged, correct, k), 1.0) if k <= judged else NOTHING for k in range(1, samples + 1)
        },
    }
