"""Advantages of responses relative to their group, the responses to one prompt (GRPO, Shao et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    *,
    scale: str = "std",
    baseline: str = "mean",
    epsilon: float = 1e-6,
) -> Tensor:
    """(r - baseline) / (std + epsilon) within each group; [B], in the rewards' floating type, without gradient.

    rewards: [B]. group_ids: [B] integers in any order, the same for the responses of one group.
    scale: "std", the population standard deviation of the group, or "none" (Dr.GRPO), which divides by nothing.
    baseline: "mean" of the group, or "leave-one-out", the mean of the group's other rewards (RLOO).
    A group whose rewards are all equal gets exact zeros.
    Raises ValueError for a group of one, rewards that are not finite, and shapes other than [B].
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale is {scale!r}, expected std or none")
    if baseline not in ("mean", "leave-one-out"):
        raise ValueError(f"baseline is {baseline!r}, expected mean or leave-one-out")
    group_ids = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [B]")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards are not finite at rows {(~torch.isfinite(rewards)).nonzero().flatten().tolist()}")

    groups, group_B, size_G = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if (size_G < 2).any():
        raise ValueError(f"groups {groups[size_G < 2].tolist()} have one response each: nothing to be compared with")
    values_B, size_G = rewards.detach().double(), size_G.double()  # double: the order of the rows hardly shows

    def group_mean_G(x_B: Tensor) -> Tensor:
        return x_B.new_zeros(len(groups)).index_add(0, group_B, x_B) / size_G

    deviation_B = values_B - group_mean_G(values_B)[group_B]
    advantages_B = deviation_B
    if baseline == "leave-one-out":  # r - (n * mean - r) / (n - 1)
        advantages_B = deviation_B * (size_G / (size_G - 1))[group_B]
    if scale == "std":
        advantages_B = advantages_B / (group_mean_G(deviation_B.square()).sqrt()[group_B] + epsilon)

    # The mean of equal rewards may be off by a rounding, which a small std would blow up: equality is tested as such.
    highest_G = values_B.new_empty(len(groups)).scatter_reduce(0, group_B, values_B, "amax", include_self=False)
    lowest_G = values_B.new_empty(len(groups)).scatter_reduce(0, group_B, values_B, "amin", include_self=False)
    advantages_B = torch.where((highest_G == lowest_G)[group_B], 0.0, advantages_B)
    return advantages_B.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())
