"""The science of EDO as pure functions: tensors and a small config in, a sum and its count (``LossTerm``) out."""

from nemo_edo.config import GRPOLossConfig
from nemo_edo.losses.advantages import group_advantages
from nemo_edo.losses.entropy import entropy_bonus
from nemo_edo.losses.exploration import exploration_term, floor_share
from nemo_edo.losses.kl import kl_per_token
from nemo_edo.losses.policy_gradient import grpo_loss
from nemo_edo.losses.supervised import sft_loss
from nemo_edo.losses.term import LossTerm, reduce_tokens, reduction_count

__all__ = [
    "GRPOLossConfig",
    "LossTerm",
    "entropy_bonus",
    "exploration_term",
    "floor_share",
    "group_advantages",
    "grpo_loss",
    "kl_per_token",
    "reduce_tokens",
    "reduction_count",
    "sft_loss",
]
