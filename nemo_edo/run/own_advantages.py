"""Advantages that a user's function computes (``grpo.advantage``). It is checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_edo.config import GRPOConfig, RunConfig
from nemo_edo.config.compose import arm_configs
from nemo_edo.errors import UserError
from nemo_edo.types import ScoredRollout
from nemo_edo.utils.import_path import load_function, said, wanted_arguments

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENTS = ("rewards", "group_ids", "successes", "lengths", "finished", "responses", "problem_ids")
"""What the function can take by name, of a collection's B responses: float32, int64, bool, int64 and bool tensors [B],
and lists of B texts."""


def check_advantages(cfg: RunConfig) -> None:
    """Raises UserError for an arm whose function cannot be called."""
    for arm, settings in arm_configs(cfg).items():
        if isinstance(settings, GRPOConfig) and settings.advantage is not None:
            own = "advantage" in cfg.arms.get(arm, {})
            OwnAdvantages(settings.advantage, f"arms.{arm}.advantage" if own else "grpo.advantage")


class OwnAdvantages:
    """An ``algorithms.grpo.AdvantageFunction``, called with the whole collection: no split of the batch changes a
    number."""

    def __init__(self, path: str, key: str = "grpo.advantage") -> None:
        self._function = load_function(path, key)
        self._name = f"{key} ({path})"
        self._arguments = wanted_arguments(self._function, ARGUMENTS, self._name)

    def __call__(self, scored: Sequence[ScoredRollout], rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[B] float32. Raises UserError where the function fails, for another shape, and for advantages that are not
        finite."""
        import torch

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
