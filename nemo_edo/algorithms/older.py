"""The exploration term on samples of an older policy: rows of an earlier iteration, which this term alone reads.

Ours, not the paper's. On samples of pi_theta itself the term's expected gradient is zero; on those of an older policy
mu it is that of -KL(mu || pi_theta), which pushes the policy away from mu.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch
import torch.nn.functional as F

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.plan import Plan
from nemo_edo.data.batching import build_batch, place_experts
from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Rollout, TrainingBatch


def with_older_samples(collected: Collected, plan: Plan, store: RolloutStore, t: int) -> Collected:
    """Iteration t's collection with the samples that its exploration term runs over (``config.explored_iteration``).

    Next to each response is one from the earlier iteration's rollouts, which share its minibatches: all of them, in an
    order that run seed and iteration fix, and again from the first where there are fewer. Their log-ratio, with its
    floor, and the noise control's ratio are against mu's log-probabilities as the engine gave them (``old_logprobs`` of
    these rows), so that no sampler correction applies. Where there is no earlier iteration, nothing explores.
    Raises UserError where the store has no rollouts of that iteration, or damaged ones.
    """
    source, size = plan.config.explored_iteration(t), len(collected.items)
    if source == t:
        return collected
    if source < 0:
        return replace(collected, batch=collected.batch.with_fields(exploration_factors=torch.zeros(size)))
    stored = store.stored(source)
    if not stored:
        raise UserError(
            f"{store.folder}: has no rollouts of iteration {source}, which iteration {t} explores from "
            f"(exploration_samples={plan.config.exploration_samples}); restore them from a copy"
        )
    order = random.Random(f"{plan.seed}, older samples {t}").sample(stored, len(stored))
    batch = _joined(collected.batch, [item.rollout for item in islice(cycle(order), size)])
    return replace(collected, batch=batch, items=[[*rows, size + item] for item, rows in enumerate(collected.items)])


def _joined(own: TrainingBatch, older: Sequence[Rollout]) -> TrainingBatch:
    """[2B, S]: B rows of the collection, then as many of an older policy, which only the exploration term reads."""
    sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in older]
    logprobs = [rollout.response_logprobs for rollout in older]
    before = own.tokens.shape[1]
    length = max(before, *(len(prompt) + len(response) for prompt, response in sequences))
    rows = build_batch(sequences, pad_id=0, length=length, old_logprobs=logprobs, sampler_logprobs=logprobs)
    experts = place_experts([rollout.routed_experts for rollout in older], sequences, length)
    if (experts is None) != (own.routed_experts is None):
        raise UserError(
            "some of the iterations' rollouts keep the experts of their tokens and others do not: sample them all with "
            "one setting of generation.routing_replay"
        )
    rows = rows.with_fields(
        exploration_factors=torch.ones(own.size), older=torch.ones(own.size), routed_experts=experts
    )
    joined = {}
    for name, value in own.with_fields(older=torch.zeros(own.size)).tensors().items():
        wide = F.pad(value, (*(0, 0) * (value.ndim - 2), 0, length - before)) if value.ndim > 1 else value
        joined[name] = torch.cat([wide, rows.tensors().get(name, torch.zeros_like(wide))])
    return TrainingBatch(**joined)
