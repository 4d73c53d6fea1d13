"""From an iteration's scored samples to GRPO's training batch, and what the samples say about the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_edo.config import GRPOConfig
from nemo_edo.data.batching import build_batch
from nemo_edo.interfaces import Policy
from nemo_edo.losses import group_advantages, kl_per_token, reduce_tokens
from nemo_edo.metrics import distinct_n
from nemo_edo.types import ScoredRollout, TrainingBatch


@dataclass(frozen=True)
class Collected:
    """An iteration's samples as one batch, with the frozen sampling policy's view of them."""

    batch: TrainingBatch
    statistics: dict[str, float]


def build_groups(scored: Sequence[ScoredRollout], policy: Policy, config: GRPOConfig, *, pad_id: int) -> Collected:
    """Advantages within each prompt's group, and log-probabilities of pi_old and the reference.

    pi_old's are computed anew by the trainer, not taken from the engine: another kernel's rounding would make the
    ratio differ from 1, and the exploration term from 0, before the first step. Their gap is a statistic.
    """
    rollouts = [item.rollout for item in scored]
    group_of = {name: index for index, name in enumerate(dict.fromkeys(r.problem_id for r in rollouts))}
    group_ids = torch.tensor([group_of[rollout.problem_id] for rollout in rollouts])
    rewards = torch.tensor([item.reward for item in scored])
    advantages = group_advantages(rewards, group_ids, scale=config.advantage_scale, baseline=config.advantage_baseline)
    batch = build_batch(
        [(r.prompt_ids, r.response_ids) for r in rollouts],
        pad_id=pad_id,
        old_logprobs=[r.response_logprobs for r in rollouts],
    )
    sampler_log_probs = batch.old_logprobs
    log_probs, entropies = policy.log_probs(batch)
    batch = replace(batch, advantages=advantages, old_logprobs=log_probs)
    if config.beta > 0:
        batch = replace(batch, ref_logprobs=policy.reference_log_probs(batch))
    return Collected(batch, _statistics(scored, batch, sampler_log_probs, entropies))


def _statistics(
    scored: Sequence[ScoredRollout], batch: TrainingBatch, sampler_log_probs: Tensor, entropies: Tensor
) -> dict[str, float]:
    groups: dict[str, list[ScoredRollout]] = {}
    for item in scored:
        groups.setdefault(item.rollout.problem_id, []).append(item)
    per_response = {
        "reward": [item.reward for item in scored],
        "well_formed": [float(item.well_formed) for item in scored],
        "response_length": [float(len(item.rollout.response_ids)) for item in scored],
    }
    per_group = {
        "distinct_4": [distinct_n([item.rollout.response_ids for item in group], n=4) for group in groups.values()],
        "zero_advantage_groups": [float(len({item.reward for item in group}) == 1) for group in groups.values()],
    }
    per_token = {
        "entropy": entropies,
        "sampler_gap": (sampler_log_probs - batch.old_logprobs).abs(),
    }
    if batch.ref_logprobs is not None:
        per_token["kl"] = kl_per_token(batch.old_logprobs, batch.ref_logprobs, "k3")
    means = {name: sum(values) / len(values) for name, values in {**per_response, **per_group}.items()}
    means |= {name: float(reduce_tokens(v, batch.mask, "token-mean").mean()) for name, v in per_token.items()}
    return means
