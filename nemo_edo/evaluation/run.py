"""Evaluation of a policy on the test problems: accuracy greedy and voted, pass@k, diversity, entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_edo.config import EvaluationConfig
from nemo_edo.data.batching import build_batch, minibatches
from nemo_edo.data.drawing import Draw, draw_scored
from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.interfaces import GenerationEngine, Policy, Scorer
from nemo_edo.metrics import answer_entropy, distinct_answers, distinct_n, pass_at_k
from nemo_edo.test_time import expected_vote_score
from nemo_edo.types import GenerationRequest, Problem, SamplingParams, ScoredRollout

KINDS = ("greedy", "sampled")
"""What an evaluation draws: one greedy response to each problem, and the sampled ones."""
SAMPLED_ENTROPY = "entropy_sampled"
"""The mean entropy as the sampled tokens' log-probabilities estimate it, without a look at whole distributions."""
Sums = dict[str, tuple[float, float]]
"""metric -> (sum, count) on one problem."""
NOTHING = (0.0, 0.0)
"""The sum and the count where a problem has nothing to measure."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates whatever policy the engine holds. Sampling is at temperature 1, over the whole vocabulary."""

    policy: Policy | None
    """What the engine holds, to compute entropies; None: it is behind a server, and they are estimated."""
    engine: GenerationEngine
    scorer: Scorer
    problems: Sequence[Problem]
    prompts: Mapping[str, tuple[int, ...]]
    config: EvaluationConfig
    max_new_tokens: int
    pad_id: int
    keeping: Callable[[str, Draw], Draw] = lambda kind, draw: draw
    """Makes a way to draw one that keeps what it draws, of one of the ``KINDS``."""

    def evaluate(
        self, arm: str, requests: Sequence[GenerationRequest], rollouts: int
    ) -> tuple[Evaluation, list[ScoredRollout]]:
        """``requests``: for each problem in order, ``rollouts`` x ``config.samples`` of them.

        Metrics, each a sum and a count for each problem:
        greedy_accuracy (one greedy response); accuracy (share of sampled responses that are right); vote@N (expected
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
        if all(item.is_judged for item in [*greedy, *scored]):
            for row in rows:
                del row["abstained"]
        return _evaluation(arm, self.problems, rows), first

    def _scored(
        self, kind: str, requests: Sequence[GenerationRequest], sampling: SamplingParams
    ) -> list[ScoredRollout]:
        def draw(requests: Sequence[GenerationRequest]) -> list[ScoredRollout]:
            return draw_scored(lambda: self.engine.generate(requests, sampling), self.scorer, self.problems)

        return self.keeping(kind, draw)(requests)

    def _entropies(self, scored: Sequence[ScoredRollout], samples: int) -> list[tuple[float, float]]:
        """(sum of entropies, tokens) of each problem's responses."""
        batch = build_batch([(s.rollout.prompt_ids, s.rollout.response_ids) for s in scored], pad_id=self.pad_id)
        _, entropies = self.policy.log_probs(batch)
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
    judged = [item for item in responses if item.is_judged]
    correct = sum(int(item.reward == 1) for item in judged)
    samples = len(rollouts[0])
    answers_of = [[item.answer for item in rollout] for rollout in rollouts]
    voting = [[item.answer for item in rollout if item.is_judged] for rollout in rollouts]
    votes = [expected_vote_score(answers, problem.answer) for answers in voting if answers]

    def over_rollouts(values: list[float]) -> tuple[float, float]:
        return sum(values) / len(values), 1.0

    def over_responses(values: list[float]) -> tuple[float, float]:
        return float(sum(values)), float(len(responses))

    return {
        "greedy_accuracy": (greedy.reward, 1.0) if greedy.is_judged else NOTHING,
        "accuracy": (float(sum(item.reward for item in judged)), float(len(judged))),
        f"vote@{samples}": over_rollouts(votes) if votes else NOTHING,
        **{
            f"pass@{k}": (pass_at_k(len(judged), correct, k), 1.0) if k <= len(judged) else NOTHING
            for k in range(1, samples + 1)
        },
        "distinct_4": over_rollouts(
            [distinct_n([item.rollout.response_ids for item in rollout], n=4) for rollout in rollouts]
        ),
        "distinct_answers": over_rollouts([float(distinct_answers(answers)) for answers in answers_of]),
        "answer_entropy": over_rollouts([answer_entropy(answers) for answers in answers_of]),
        "well_formed": over_responses([float(item.well_formed) for item in responses]),
        "response_length": over_responses([float(len(item.rollout.response_ids)) for item in responses]),
        "abstained": (float(sum(not item.is_judged for item in [greedy, *responses])), float(len(responses) + 1)),
    }


def _evaluation(arm: str, problems: Sequence[Problem], rows: Sequence[Sums]) -> Evaluation:
    metrics = {
        name: (np.array([row[name][0] for row in rows]), np.array([row[name][1] for row in rows])) for name in rows[0]
    }
    return Evaluation(arm, tuple(problem.id for problem in problems), metrics)
