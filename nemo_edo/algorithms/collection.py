"""What an iteration trains on, and what its samples say about the policy that generated them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_edo.config import ArmConfig, LoopConfig
from nemo_edo.data.batching import build_batch, epoch_order, place_experts
from nemo_edo.interfaces import Policy
from nemo_edo.losses import kl_per_token, reduce_tokens, sampler_mismatch
from nemo_edo.metrics import distinct_answers, distinct_n, pass_at_k, vote_success
from nemo_edo.types import UNVERIFIED, ScoredRollout, TrainingBatch
from nemo_edo.utils.phases import PhaseClock

CHECKED_EVERY = 10
"""Where pi_old's log-probabilities may be the engine's, the trainer computes those of every tenth prompt's samples."""
SAME_MEAN, SAME_MAX = 1e-5, 1e-3
"""Nats per token, mean and largest, up to which the engine's log-probabilities are the trainer's: fp32 rounds to about
1e-6, bf16 to about 1e-2."""


@dataclass(frozen=True)
class Collected:
    """An iteration's samples as one batch, with the frozen sampling policy's view of them."""

    batch: TrainingBatch
    items: list[list[int]]
    """What an epoch shuffles and a minibatch counts: rows of the batch that are trained on together."""
    statistics: dict[str, float]

    def order(self, seed: int, epoch: int, *, keep_groups: bool) -> list[int]:
        """The items in the order in which an epoch visits them: a shuffled one or, to keep groups, that of shuffled
        groups, one group after the other."""
        if not keep_groups:
            return epoch_order(len(self.items), seed, epoch)
        members: dict[int, list[int]] = {}
        group_of = self.batch.groups.tolist()
        for item, rows in enumerate(self.items):
            members.setdefault(group_of[rows[0]], []).append(item)
        groups = list(members.values())
        return [item for group in epoch_order(len(groups), seed, epoch) for item in groups[group]]


class Objective(Protocol):
    """What Algorithm 1 trains with: ED-GRPO or ED-iDPO."""

    config: ArmConfig

    def build(self, scored: Sequence[ScoredRollout], policy: Policy, clock: PhaseClock) -> Collected:
        """An iteration's batch from its scored samples; the policy is still the one that generated them. clock: gets
        the phases of the policy's forward passes."""

    def minibatch(self, collected: Collected, items: Sequence[int], seed: str) -> TrainingBatch:
        """One optimizer step's global batch. What needs statistics of the whole of it is computed here, before it is
        split. The seed fixes random choices."""


def by_problem(scored: Sequence[ScoredRollout]) -> dict[str, list[ScoredRollout]]:
    """The groups of responses to one prompt, in order of first appearance."""
    groups: dict[str, list[ScoredRollout]] = {}
    for item in scored:
        groups.setdefault(item.rollout.problem_id, []).append(item)
    return groups


def group_numbers(scored: Sequence[ScoredRollout]) -> Tensor:
    """[B] int64: the group number of each response, in order of first appearance."""
    numbers = {problem: number for number, problem in enumerate(by_problem(scored))}
    return torch.tensor([numbers[item.rollout.problem_id] for item in scored])


def view_of_sampler(
    scored: Sequence[ScoredRollout],
    policy: Policy,
    clock: PhaseClock,
    *,
    pad_id: int,
    with_reference: bool,
    old_logprobs: str = LoopConfig.old_logprobs,
) -> tuple[TrainingBatch, dict[str, float]]:
    """All samples of an iteration as a batch, and their statistics. The batch has groups, rewards, old_logprobs, the
    engine's sampler_logprobs where they are not old_logprobs and, if asked for, ref_logprobs.
    old_logprobs: "trainer", "sampler" or "auto".

    The trainer's are computed anew: another kernel's rounding would make the ratio differ from 1, and the exploration
    term from 0, before the first step. The sampler's are the engine's own; then the trainer computes those of some
    prompts only. "auto" takes the sampler's where the two agree on these prompts up to ``SAME_MEAN`` and ``SAME_MAX``,
    otherwise the trainer's.

    The statistics are those of ``response_statistics`` and of ``losses.sampler_mismatch`` (the engine's pi_gen against
    the trainer's pi_old), and the means over response tokens of the policy's "entropy" (exact, nats) and of "kl", the
    k3 estimate of KL(pi_old || pi_ref) (nats), where the reference was asked. Where pi_old's log-probabilities are the
    engine's ("old_from_sampler" is 1, otherwise 0), gap and entropy are those of the samples that the trainer has seen.
    """
    rollouts = [item.rollout for item in scored]
    sequences = [(r.prompt_ids, r.response_ids) for r in rollouts]
    batch = build_batch(sequences, pad_id=pad_id, sampler_logprobs=[r.response_logprobs for r in rollouts])
    batch = batch.with_fields(
        routed_experts=place_experts([r.routed_experts for r in rollouts], sequences, batch.tokens.shape[1]),
        groups=group_numbers(scored),
        rewards=torch.tensor([item.reward for item in scored], dtype=torch.float32),
    )
    checked = batch.groups % CHECKED_EVERY == 0
    seen, entropies = _seen(batch if old_logprobs == "trainer" else batch.rows(checked), policy, clock)
    gap = (seen.old_logprobs - seen.sampler_logprobs)[seen.mask != 0].double().abs()
    agrees = old_logprobs == "auto" and bool(gap.mean() <= SAME_MEAN and gap.max() <= SAME_MAX)
    trusted = old_logprobs == "sampler" or agrees
    if not trusted and seen.size < batch.size:
        rest, others = _seen(batch.rows(~checked), policy, clock)
        places = torch.cat([checked.nonzero(), (~checked).nonzero()]).squeeze(-1).argsort()
        own = torch.cat([seen.old_logprobs, rest.old_logprobs])[places]
        seen, entropies = batch.with_fields(old_logprobs=own), torch.cat([entropies, others])[places]
    batch = batch.with_fields(old_logprobs=batch.sampler_logprobs, sampler_logprobs=None) if trusted else seen
    if with_reference:
        with clock.phase("log_pi_ref"):
            batch = batch.with_fields(ref_logprobs=policy.reference_logprobs(batch))
    statistics = {**response_statistics(scored), "entropy": _token_mean(entropies, seen)}
    if batch.ref_logprobs is not None:
        statistics["kl"] = _token_mean(kl_per_token(batch.old_logprobs, batch.ref_logprobs, "k3"), batch)
    statistics |= sampler_mismatch(seen.old_logprobs, seen.sampler_logprobs, seen.mask)
    return batch, {**statistics, "old_from_sampler": float(trusted)}


def _seen(batch: TrainingBatch, policy: Policy, clock: PhaseClock) -> tuple[TrainingBatch, Tensor]:
    with clock.phase("log_pi_old"):
        own, entropies = policy.logprobs(batch)
    return batch.with_fields(old_logprobs=own), entropies


def _token_mean(values: Tensor, batch: TrainingBatch) -> float:
    return float(reduce_tokens(values, batch.mask, "token-mean").mean())


def response_statistics(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """What the responses show about the policy that generated them.

    Means over responses: "reward", "accuracy" (share of successes), "well_formed", "truncated" (share that did not
    end by itself), "unverified" (share whose answer exceeded the verifier's limits), "response_length" (tokens), and
    "reward/PART" of each part of a custom reward, over the responses that have it.
    Means over the groups of responses to one prompt: "voted_accuracy" (``vote_success``), "pass@k" (unbiased; k up to
    the smallest group's size), "distinct_4", "distinct_answers" and "zero_advantage_groups" (share whose rewards are
    all equal).
    Over all responses together: "distinct_4_pooled".
    """
    groups = list(by_problem(scored).values())
    largest_k = min(map(len, groups))
    values: dict[str, list[float]] = {}  # what each statistic is the mean of
    for group in groups:
        names = dict.fromkeys(name for item in group for name in item.parts)
        correct = sum(item.success for item in group)
        of_group = {
            "reward": [item.reward for item in group],
            "accuracy": [float(item.success) for item in group],
            "well_formed": [float(item.well_formed) for item in group],
            "truncated": [float(not item.rollout.finished) for item in group],
            "unverified": [float(item.reason.startswith(UNVERIFIED)) for item in group],
            "response_length": [float(len(item.rollout.response_ids)) for item in group],
            **{f"reward/{name}": [item.parts[name] for item in group if name in item.parts] for name in names},
            "voted_accuracy": [vote_success([item.answer for item in group], [item.success for item in group])],
            **{f"pass@{k}": [pass_at_k(len(group), correct, k)] for k in range(1, largest_k + 1)},
            "distinct_4": [distinct_n([item.rollout.response_ids for item in group], n=4)],
            "distinct_answers": [float(distinct_answers(item.answer for item in group))],
            "zero_advantage_groups": [float(len({item.reward for item in group}) == 1)],
        }
        for name, more in of_group.items():
            values.setdefault(name, []).extend(more)
    values["distinct_4_pooled"] = [distinct_n([item.rollout.response_ids for item in scored], n=4)]
    return {name: sum(found) / len(found) for name, found in values.items()}


def step_statistics(batch: TrainingBatch) -> dict[str, float]:
    """What a step's global batch says before any model has seen it, so the same in every layout.

    Over its responses: "reward" (mean), "advantage_spread" (population standard deviation), "zero_advantage_groups"
    (share of the prompts there whose responses all have advantage 0), "share_with_pairs" (of the prompts),
    "response_length" (mean, tokens). Over its response tokens: "sampler_gap_max" (|log pi_old - log pi_gen|, nats) and
    "sampler_ratio_max" (pi_old / pi_gen). What the batch has no tensors for is left out, and so are responses of an
    older policy.
    """
    batch = batch.own
    counted = batch.mask != 0
    real = counted.any(dim=1)
    statistics = {"response_length": float(counted.sum() / real.sum())}
    if batch.rewards is not None:
        statistics["reward"] = float(batch.rewards[real].double().mean())
    if batch.advantages is not None:
        statistics["advantage_spread"] = float(batch.advantages[real].double().std(correction=0))
    if batch.groups is not None:
        groups = batch.groups[real]
        prompts = groups.unique().numel()
        if batch.advantages is not None:
            informed = groups[batch.advantages[real] != 0].unique().numel()
            statistics["zero_advantage_groups"] = 1 - informed / prompts
        if batch.pair_role is not None:
            statistics["share_with_pairs"] = groups[batch.pair_role[real] != 0].unique().numel() / prompts
    if batch.sampler_logprobs is not None and batch.old_logprobs is not None:
        gap = (batch.old_logprobs - batch.sampler_logprobs)[counted].double()
        statistics |= {"sampler_gap_max": float(gap.abs().max()), "sampler_ratio_max": float(gap.max().exp())}
    return statistics
