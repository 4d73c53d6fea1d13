"""What an iteration trains on, and what its samples say about the policy that drew them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nemo_edo.config import LoopConfig
from nemo_edo.data.batching import build_batch
from nemo_edo.interfaces import Policy
from nemo_edo.losses import kl_per_token, reduce_tokens
from nemo_edo.metrics import distinct_n
from nemo_edo.types import ScoredRollout, TrainingBatch


@dataclass(frozen=True)
class Collected:
    """An iteration's samples as one batch, with the frozen sampling policy's view of them."""

    batch: TrainingBatch
    items: list[list[int]]
    """What an epoch puts in a new order and a minibatch counts: rows of the batch that are trained on together."""
    statistics: dict[str, float]


class Objective(Protocol):
    """What Algorithm 1 trains with: ED-GRPO or ED-iDPO."""

    config: LoopConfig

    def build(self, scored: Sequence[ScoredRollout], policy: Policy) -> Collected:
        """An iteration's batch from its scored samples; the policy still is the one that drew them."""

    def minibatch(self, collected: Collected, items: Sequence[int], seed: str) -> TrainingBatch:
        """One optimizer step's global batch. What needs statistics of the whole of it is computed here, before it is
        split. The seed fixes random choices."""


def by_problem(scored: Sequence[ScoredRollout]) -> dict[str, list[ScoredRollout]]:
    """The groups of responses to one prompt, in order of first appearance."""
    groups: dict[str, list[ScoredRollout]] = {}
    for item in scored:
        groups.setdefault(item.rollout.problem_id, []).append(item)
    return groups


@dataclass(frozen=True)
class Sampled:
    """All samples of an iteration as a batch, as the trainer sees them."""

    batch: TrainingBatch
    """With old_logprobs of the trainer, sampler_logprobs of the engine and, if asked for, ref_logprobs."""
    entropies: Tensor


def view_of_sampler(scored: Sequence[ScoredRollout], policy: Policy, *, pad_id: int, with_reference: bool) -> Sampled:
    """Log-probabilities of all samples under pi_old and the reference.

    pi_old's are computed anew by the trainer, not taken from the engine: another kernel's rounding would make the
    ratio differ from 1, and the exploration term from 0, before the first step. Their gap is a statistic.
    """
    rollouts = [item.rollout for item in scored]
    batch = build_batch(
        [(r.prompt_ids, r.response_ids) for r in rollouts],
        pad_id=pad_id,
        sampler_logprobs=[r.response_logprobs for r in rollouts],
    )
    old_logprobs, entropies = policy.log_probs(batch)
    batch = batch.with_fields(old_logprobs=old_logprobs)
    if with_reference:
        batch = batch.with_fields(ref_logprobs=policy.reference_log_probs(batch))
    return Sampled(batch, entropies)


def sample_statistics(scored: Sequence[ScoredRollout], sampled: Sampled) -> dict[str, float]:
    """Means over responses, groups or tokens of what the samples show."""
    batch = sampled.batch
    groups = by_problem(scored).values()
    per_response = {
        "reward": [item.reward for item in scored],
        "well_formed": [float(item.well_formed) for item in scored],
        "truncated": [float(not item.rollout.finished) for item in scored],
        "response_length": [float(len(item.rollout.response_ids)) for item in scored],
    }
    per_group = {
        "distinct_4": [distinct_n([item.rollout.response_ids for item in group], n=4) for group in groups],
        "distinct_answers": [float(len({item.answer for item in group} - {None})) for group in groups],
        "zero_advantage_groups": [float(len({item.reward for item in group}) == 1) for group in groups],
    }
    gap = (batch.sampler_logprobs - batch.old_logprobs).abs()
    per_token: Mapping[str, Tensor] = {"entropy": sampled.entropies, "sampler_gap": gap}
    if batch.ref_logprobs is not None:
        per_token = {**per_token, "kl": kl_per_token(batch.old_logprobs, batch.ref_logprobs, "k3")}
    means = {name: sum(values) / len(values) for name, values in {**per_response, **per_group}.items()}
    return means | {name: float(reduce_tokens(v, batch.mask, "token-mean").mean()) for name, v in per_token.items()}
