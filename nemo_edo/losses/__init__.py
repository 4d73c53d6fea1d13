"""The science of EDO as pure functions: tensors and a small config in, a sum and its count (``LossTerm``) out."""

from nemo_edo.config import DPOLossConfig, GRPOLossConfig
from nemo_edo.losses.advantages import (
    group_advantages,
    informative_groups,
    pass_at_k_advantages,
    positive_downweighted_advantages,
    soft_overlong_penalty,
    solved_groups,
)
from nemo_edo.losses.checks import NotFinite, one_check, without_checks
from nemo_edo.losses.covariance import clip_cov_selection, kl_cov_selection, token_covariances
from nemo_edo.losses.diagnostics import token_spread
from nemo_edo.losses.exploration import (
    exploration_noise_term,
    exploration_per_token,
    exploration_term,
    floor_share,
)
from nemo_edo.losses.importance import (
    icepop_weights,
    sampler_gap,
    sampler_mismatch,
    sequence_masked_weights,
    truncated_importance_weights,
)
from nemo_edo.losses.kl import kl_per_token
from nemo_edo.losses.novelty import NgramPaths, PathFunction, each_path, novelty_advantages, redundancy_shares
from nemo_edo.losses.policy_gradient import (
    cispo_config,
    dapo_config,
    dr_grpo_config,
    grpo_exploration,
    grpo_loss,
    gspo_config,
    ppo_clip_loss,
    reinforce_config,
)
from nemo_edo.losses.preference import (
    dpo_loss,
    ed_idpo_loss,
    ipo_loss,
    preference_loss,
    preference_metrics,
    selm_loss,
    sequence_logprobs,
    vpo_loss,
    xpo_loss,
)
from nemo_edo.losses.ranking import ranking_nce_loss
from nemo_edo.losses.schedules import Schedule, build_schedule
from nemo_edo.losses.term import LossTerm, entropy_bonus, reduce_tokens, reduction_count, sft_loss

__all__ = [
    "DPOLossConfig",
    "GRPOLossConfig",
    "LossTerm",
    "NgramPaths",
    "NotFinite",
    "PathFunction",
    "Schedule",
    "build_schedule",
    "cispo_config",
    "clip_cov_selection",
    "dapo_config",
    "dpo_loss",
    "dr_grpo_config",
    "each_path",
    "ed_idpo_loss",
    "entropy_bonus",
    "exploration_noise_term",
    "exploration_per_token",
    "exploration_term",
    "floor_share",
    "group_advantages",
    "grpo_exploration",
    "grpo_loss",
    "gspo_config",
    "icepop_weights",
    "informative_groups",
    "ipo_loss",
    "kl_cov_selection",
    "kl_per_token",
    "novelty_advantages",
    "one_check",
    "pass_at_k_advantages",
    "positive_downweighted_advantages",
    "ppo_clip_loss",
    "preference_loss",
    "preference_metrics",
    "ranking_nce_loss",
    "reduce_tokens",
    "reduction_count",
    "redundancy_shares",
    "reinforce_config",
    "sampler_gap",
    "sampler_mismatch",
    "selm_loss",
    "sequence_logprobs",
    "sequence_masked_weights",
    "sft_loss",
    "soft_overlong_penalty",
    "solved_groups",
    "token_covariances",
    "token_spread",
    "truncated_importance_weights",
    "vpo_loss",
    "without_checks",
    "xpo_loss",
]
