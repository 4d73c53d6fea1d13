"""Evaluation of a policy on the test problems: accuracy greedy and voted, pass@k, diversity, entropy.

Every number of sampled responses is at one stated temperature: that of the sampling, and of the distributions whose
entropy it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_edo.config import EvaluationConfig
from nemo_edo.data.batching import build_batch, minibatches
from nemo_edo.evaluation.results import (
    AT_BEST,
    BEST_TEMPERATURE,
    GREEDY,
    NOTHING,
    OF_ANSWERS,
    SAMPLED_ENTROPY,
    Evaluation,
    Sums,
    at_temperature,
    kind_at,
    plain_name,
)
from nemo_edo.evaluation.samples import Samples, meaningless, plain_metrics, votes
from nemo_edo.interfaces import Policy
from nemo_edo.metrics import pass_at_k
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout

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
    ) -> tuple[Evaluation, list[ScoredRollout]]:
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

        At the config's first temperature they have these names, at the others ``results.at_temperature``'s. With
        ``tuning``, those at the temperature whose votes are best on its problems have ``results.AT_BEST``'s, too, and
        "best_temperature" is that temperature.

        Returns the evaluation and the first rollout's scored responses at the first temperature, for the report's
        examples.
        """
        each, (main, *others) = self.config.samples, self.config.temperature
        greedy = Samples.of_scored(self._scored(GREEDY, requests[:: rollouts * each], 0.0, self.problems), 1)
        rows, sampled, scored = self._measured(requests, main, rollouts, greedy)
        first = [item for responses in minibatches(scored, rollouts * each) for item in responses[:each]]
        measured, everything = {main: rows}, [greedy, sampled]
        for temperature in others:
            measured[temperature], sampled, _ = self._measured(requests, temperature, rollouts, None)
            everything.append(sampled)
        named = [(at_temperature(temperature), measured[temperature]) for temperature in others]
        unneeded = meaningless(*everything)
        has_answers = not unneeded.issuperset(OF_ANSWERS)
        if tuning is not None and has_answers:
            means = self.tuned(tuning)
            best = max(measured, key=means.get)  # the first of equals
            named += [(AT_BEST, measured[best]), ("", [{BEST_TEMPERATURE: (best, 1.0)}] * len(rows))]
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
        rows = [{name: sums for name, sums in row.items() if plain_name(name) not in unneeded} for row in rows]
        return Evaluation.of_rows(arm, [problem.id for problem in self.problems], rows, temperature=main), first

    def tuned(self, tuning: Tuning) -> dict[float, float]:
        """Each temperature's mean vote over N = ``config.samples`` responses to the tuning problems."""
        means = {}
        for temperature in self.config.temperature:
            kind = kind_at(temperature, self.config, tuning=True)
            scored = self._scored(kind, tuning.requests, temperature, tuning.problems)
            found = votes(Samples.of_scored(scored, self.config.samples), self.config.samples)
            sums, counts = map(math.fsum, zip(*found, strict=True))
            means[temperature] = sums / counts if counts else 0.0  # a judge may have abstained on all of them
        return means

    def _measured(
        self, requests: Sequence[GenerationRequest], temperature: float, rollouts: int, greedy: Samples | None
    ) -> tuple[list[Sums], Samples, list[ScoredRollout]]:
        each = self.config.samples
        scored = self._scored(kind_at(temperature, self.config), requests, temperature, self.problems)
        sampled = Samples.of_scored(scored, rollouts * each)
        rows = plain_metrics(sampled, each, greedy)
        if self.policy is not None:
            for row, entropy in zip(rows, self._entropies(scored, rollouts, temperature), strict=True):
                del row[SAMPLED_ENTROPY]
                row["entropy"] = entropy
        for row, vote in zip(rows, votes(sampled, each), strict=True):
            row[f"vote@{each}"] = vote
            correct, judged = map(int, row["accuracy"])
            for k in range(1, each + 1):
                row[f"pass@{k}"] = (pass_at_k(judged, correct, k), 1.0) if k <= judged else NOTHING
        return rows, sampled, scored

    def _scored(
        self, kind: str, requests: Sequence[GenerationRequest], temperature: float, problems: Sequence[Problem]
    ) -> list[ScoredRollout]:
        return self.respond(kind, requests, SamplingParams(temperature, 1.0, self.max_new_tokens), problems)

    def _entropies(
        self, scored: Sequence[ScoredRollout], rollouts: int, temperature: float
    ) -> list[tuple[float, float]]:
        """(sum of entropies, tokens) of each problem's responses in the first rollout."""
        each = self.config.samples
        of_problem = minibatches(scored, rollouts * each)
        first = [item.rollout for responses in of_problem for item in responses[:each]]
        batch = build_batch([(one.prompt_ids, one.response_ids) for one in first], pad_id=self.pad_id)
        _, entropies = self.policy.logprobs(batch, temperature=temperature)
        sums = (entropies * batch.mask).sum(dim=1).reshape(-1, each).sum(dim=1)
        counts = batch.mask.sum(dim=1).reshape(-1, each).sum(dim=1)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))
