"""Evaluation of a policy on the test problems: accuracy greedy and voted, pass@k, diversity, entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_edo.config import EvaluationConfig
from nemo_edo.data.batching import build_batch, minibatches
from nemo_edo.evaluation.results import NOTHING, SAMPLED_ENTROPY, Evaluation, Sums
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n, pass_at_k
from nemo_edo.rollouts.resumable import Answer, generate_scored
from nemo_edo.test_time import expected_vote_score
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the engine's current policy. Sampling is at temperature 1, over the whole vocabulary."""

    policy: Policy | None
    """The engine's policy, to compute entropies; None: it is behind a server, and they are estimated."""
    engine: GenerationEngine
    scorer: Scorer
    problems: Sequence[Problem]
    prompts: Mapping[str, tuple[int, ...]]
    config: EvaluationConfig
    max_new_tokens: int
    pad_id: int
    keeping: Callable[[str, Answer], Answer] = lambda kind, answer: answer
    """Makes an ``Answer`` one that keeps its responses, of one of the ``KINDS``."""

    def evaluate(
        self, arm: str, requests: Sequence[GenerationRequest], rollouts: int
    ) -> tuple[Evaluation, list[ScoredRollout]]:
        """``requests``: for each problem in order, ``rollouts`` x ``config.samples`` of them.

        Metrics, each a sum and a count for each problem:
        greedy_accuracy (one greedy response); accuracy (share of sampled responses that are right); reward (their mean
        reward, where rewards are graded: where some reward is not 1 for a success or 0 for a failure); vote@N (expected
        score of the majority vote over N = ``config.samples`` responses, averaged over rollouts); pass@k (unbiased,
        over all samples; the largest k is the best of all samples); distinct_4, distinct_answers and answer_entropy
        (nats; each among a problem's N responses, averaged over rollouts); entropy (exact, mean over the response
        positions of the first rollout), or without a policy entropy_sampled (minus the mean log-probability of the
        sampled tokens, whose expectation it is); well_formed; response_length (tokens). Where a judge abstained on a
        response, accuracies, votes and pass@k leave it out, and "abstained" is the share of those.

        Returns the evaluation and the first rollout's scored responses, for the report's examples.
        """
        samples = self.config.samples
        each = rollouts * samples
        greedy = self._scored("greedy", requests[::each], SamplingParams(0.0, 1.0, self.max_new_tokens))
        scored = self._scored("sampled", requests, SamplingParams(1.0, 1.0, self.max_new_tokens))
        of_problem = minibatches(scored, each)
        first = [item for responses in of_problem for item in responses[:samples]]
        name = SAMPLED_ENTROPY if self.policy is None else "entropy"
        entropies = _sampled_entropies(of_problem) if self.policy is None else self._entropies(first, samples)
        rows = [
            {**_metrics(problem, minibatches(responses, samples), answer), name: entropy}
            for problem, responses, answer, entropy in zip(self.problems, of_problem, greedy, entropies, strict=True)
        ]
        everything = [*greedy, *scored]
        unneeded = {
            "abstained": all(item.has_verdict for item in everything),
            "reward": all(item.reward == item.success for item in everything),
        }
        rows = [{name: sums for name, sums in row.items() if not unneeded.get(name)} for row in rows]
        return Evaluation.of_rows(arm, [problem.id for problem in self.problems], rows), first

    def _scored(
        self, kind: str, requests: Sequence[GenerationRequest], sampling: SamplingParams
    ) -> list[ScoredRollout]:
        answer = partial(
            generate_scored, engine=self.engine, scorer=self.scorer, sampling=sampling, problems=self.problems
        )
        return self.keeping(kind, answer)(requests)

    def _entropies(self, scored: Sequence[ScoredRollout], samples: int) -> list[tuple[float, float]]:
        """(sum of entropies, tokens) of each problem's responses."""
        batch = build_batch([(s.rollout.prompt_ids, s.rollout.response_ids) for s in scored], pad_id=self.pad_id)
        _, entropies = self.policy.logprobs(batch)
        sums = (entropies * batch.mask).sum(dim=1).reshape(-1, samples).sum(dim=1)
        counts = batch.mask.sum(dim=1).reshape(-1, samples).sum(dim=1)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))


def _sampled_entropies(of_problem: Sequence[Sequence[ScoredRollout]]) -> list[tuple[float, float]]:
    """(minus the sum of log-probabilities, tokens) of each problem's responses."""
    logprobs_of = [
        [value for item in responses for value in item.rollout.response_logprobs] for responses in of_problem
    ]
    return [(-math.fsum(logprobs), float(len(logprobs))) for logprobs in logprobs_of]


def _metrics(problem: Problem, rollouts: Sequence[Sequence[ScoredRollout]], greedy: ScoredRollout) -> Sums:
    responses = [item for rollout in rollouts for item in rollout]
    with_verdict = [item for item in responses if item.has_verdict]
    correct = sum(item.success for item in with_verdict)
    samples = len(rollouts[0])
    answers_of = [[item.answer for item in rollout] for rollout in rollouts]
    voting = [[item.answer for item in rollout if item.has_verdict] for rollout in rollouts]
    votes = [expected_vote_score(answers, problem.answer) for answers in voting if answers]

    def over_rollouts(values: list[float]) -> tuple[float, float]:
        return sum(values) / len(values), 1.0

    def over_responses(values: list[float]) -> tuple[float, float]:
        return float(sum(values)), float(len(responses))

    return {
        "greedy_accuracy": (float(greedy.success), 1.0) if greedy.has_verdict else NOTHING,
        "accuracy": (float(correct), float(len(with_verdict))),
        "reward": (float(sum(item.reward for item in with_verdict)), float(len(with_verdict))),
        f"vote@{samples}": over_rollouts(votes) if votes else NOTHING,
        **{
            f"pass@{k}": (pass_at_k(len(with_verdict), correct, k), 1.0) if k <= len(with_verdict) else NOTHING
            for k in range(1, samples + 1)
        },
        "distinct_4": over_rollouts(
            [distinct_n([item.rollout.response_ids for item in rollout], n=4) for rollout in rollouts]
        ),
        "distinct_answers": over_rollouts([float(distinct_answers(answers)) for answers in answers_of]),
        "answer_entropy": over_rollouts([answer_entropy(answers) for answers in answers_of]),
        "well_formed": over_responses([float(item.well_formed) for item in responses]),
        "response_length": over_responses([float(len(item.rollout.response_ids)) for item in responses]),
        "abstained": (float(sum(not item.has_verdict for item in [greedy, *responses])), float(len(responses) + 1)),
    }
