"""ED-GRPO and its baselines: from an iteration's scored samples to advantages within each prompt's group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_edo import losses
from nemo_edo.algorithms.collection import Collected, by_problem, group_numbers, view_of_sampler
from nemo_edo.algorithms.plan import request_seed
from nemo_edo.builtin_task.arithmetic import solution_path
from nemo_edo.config import GRPOConfig
from nemo_edo.errors import UserError
from nemo_edo.interfaces import Policy
from nemo_edo.types import ScoredRollout, TrainingBatch
from nemo_edo.utils.import_path import load_function, said, wanted_arguments
from nemo_edo.utils.phases import PhaseClock

AdvantageFunction = Callable[[Sequence[ScoredRollout], Tensor, Tensor], Tensor]
"""A user's advantages, [B] float32, from all B responses of a collection, their rewards and their groups' numbers."""


@dataclass(frozen=True)
class GRPO:
    """``collection.Objective`` of GRPO, DAPO, Dr.GRPO, ED-GRPO and pass@k training, as ``config`` says."""

    config: GRPOConfig
    questions: Mapping[str, str]
    """Questions by problem id, which solution paths are parsed with."""
    max_new_tokens: int
    pad_id: int
    own_advantages: AdvantageFunction | None = None
    """What computes the advantages in place of the built-in kinds (``config.advantage``)."""

    def build(self, scored: Sequence[ScoredRollout], policy: Policy, clock: PhaseClock) -> Collected:
        config = self.config
        corrected = config.sampler_correction != "none"  # which needs both
        sampled, statistics = view_of_sampler(
            scored,
            policy,
            clock,
            pad_id=self.pad_id,
            with_reference=config.beta > 0,
            old_logprobs="trainer" if corrected else config.old_logprobs,
        )
        group_ids, rewards = sampled.groups, sampled.rewards
        advantages = self._advantages(scored, rewards, group_ids)
        weights = torch.ones_like(advantages)
        statistics["advantage_spread"] = float(advantages.std(correction=0))
        if config.novelty_strength or config.redundancy_weighted:
            correct = _successes(scored)
            paths_of = losses.each_path(solution_path) if config.solution_paths == "arithmetic" else losses.NgramPaths()
            paths = {}
            for problem, group in by_problem(scored).items():
                labels = paths_of(self.questions[problem], [item.rollout.text for item in group])
                paths |= zip(map(id, group), labels, strict=True)
            path_of_each = [paths[id(item)] for item in scored]
            shares = losses.redundancy_shares(path_of_each, correct, group_ids)
            strength = config.novelty_strength
            statistics["redundancy"] = float(shares[correct].mean()) if correct.any() else 0.0
            advantages = losses.novelty_advantages(advantages, shares, correct, group_ids, strength=strength)
            weights = shares if config.redundancy_weighted else weights
        if not config.explore_uninformative_groups:
            weights = weights * losses.informative_groups(rewards, group_ids)
        if config.explore_solved_groups_only:
            weights = weights * losses.solved_groups(_successes(scored), group_ids)
        batch = sampled.with_fields(advantages=advantages.float(), exploration_factors=weights.float())
        return Collected(batch, [[row] for row in range(batch.size)], statistics)

    def minibatch(self, collected: Collected, items: Sequence[int], seed: str) -> TrainingBatch:
        rows = [row for item in items for row in collected.items[item]]
        batch, config = collected.batch.rows(torch.tensor(rows)), self.config
        if config.covariance_control == "none":
            return batch
        mask = batch.own.mask
        # pi_old's log-probabilities: those of pi_theta would take one more forward pass before each step.
        covariances = losses.token_covariances(batch.old_logprobs, batch.advantages, mask)
        share = config.covariance_share
        if config.covariance_control == "clip-cov":
            bounds = {"low": config.clip_cov_low, "high": config.clip_cov_high}
            selected = losses.clip_cov_selection(covariances, mask, share=share, seed=request_seed(seed), **bounds)
        else:
            selected = losses.kl_cov_selection(covariances, mask, share=share)
        return batch.with_fields(selected=selected.float())

    def _advantages(self, scored: Sequence[ScoredRollout], rewards: Tensor, group_ids: Tensor) -> Tensor:
        config = self.config
        if config.pass_k is not None:
            return losses.pass_at_k_advantages(_successes(scored).float(), group_ids, config.pass_k)
        if config.overlong_buffer is not None:
            lengths = torch.tensor([len(item.rollout.response_ids) for item in scored])
            rewards = rewards + losses.soft_overlong_penalty(
                lengths, max_length=self.max_new_tokens, cache_length=config.overlong_buffer
            )
        if self.own_advantages is not None:
            return self.own_advantages(scored, rewards, group_ids)
        return losses.group_advantages(
            rewards,
            group_ids,
            scale=config.advantage_scale,
            baseline=config.advantage_baseline,
            deviation=config.advantage_deviation,
        )


def _successes(scored: Sequence[ScoredRollout]) -> Tensor:
    """[B] bool."""
    return torch.tensor([item.success for item in scored])


def keep_informative(scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """The responses in groups whose rewards are not all equal (DAPO's dynamic sampling)."""
    if not scored:
        return []
    keep = losses.informative_groups(torch.tensor([item.reward for item in scored]), group_numbers(scored))
    return [item for item, kept in zip(scored, keep.tolist(), strict=True) if kept]


ARGUMENTS = ("rewards", "group_ids", "successes", "lengths", "finished", "responses", "problem_ids")
"""Arguments that the function can take by name, of a collection's B responses: float32, int64, bool, int64 and bool
tensors [B], and lists of B texts."""


class OwnAdvantages:
    """An ``AdvantageFunction`` from a user's module (``grpo.advantage``), called with the whole collection: no split of
    the batch changes a number."""

    def __init__(self, path: str, key: str = "grpo.advantage") -> None:
        self._function = load_function(path, key)
        self._name = f"{key} ({path})"
        self._arguments = wanted_arguments(self._function, ARGUMENTS, self._name)

    def __call__(self, scored: Sequence[ScoredRollout], rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[B] float32. Raises UserError where the function fails, for another shape, and for advantages that are not
        finite."""
        rollouts = [item.rollout for item in scored]
        offered = (
            rewards.clone(), group_ids.clone(), torch.tensor([item.success for item in scored]),
            torch.tensor([len(one.response_ids) for one in rollouts]), torch.tensor([one.finished for one in rollouts]),
            [one.text for one in rollouts], [one.problem_id for one in rollouts],
        )  # fmt: skip
        given = dict(zip(ARGUMENTS, offered, strict=True))
        try:
            returned = self._function(**{name: given[name] for name in self._arguments})
        except Exception as error:  # whatever a user's function raises is a user's error
            raise UserError(f"{self._name} raised {said(error)}; the responses are stored, rerun to resume") from error
        try:
            advantages = torch.as_tensor(returned, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{self._name} returned {type(returned).__name__}, which is no tensor ({error})") from error
        if advantages.shape != (len(scored),):
            raise UserError(f"{self._name} returned the shape {tuple(advantages.shape)}, expected ({len(scored)},)")
        strange = (~torch.isfinite(advantages)).nonzero().flatten().tolist()
        if strange:
            rollout = scored[strange[0]].rollout
            raise UserError(
                f"{self._name} returned {float(advantages[strange[0]])} for response {rollout.sample_index} to problem "
                f"{rollout.problem_id} ({len(strange)} of {len(scored)} advantages are not finite)"
            )
        return advantages
