"""The science of EDO as pure functions: tensors and a small config in, a sum and its count (``LossTerm``) out."""

from nemo_edo.config import DPOLossConfig, GRPOLossConfig
from nemo_edo.losses.advantages import (
    NgramPaths,
    PathFunction,
    each_path,
    group_advantages,
    informative_groups,
    novelty_advantages,
    pass_at_k_advantages,
    positive_downweighted_advantages,
    redundancy_shares,
    soft_overlong_penalty,
    solved_groups,
)
from nemo_edo.losses.checks import NotFinite, one_check, without_checks
from nemo_edo.losses.exploration import exploration_noise_term, exploration_per_token, exploration_term, floor_share
from nemo_edo.losses.importance import (
    icepop_weights,
    sampler_gap,
    sampler_mismatch,
    sequence_masked_weights,
    token_spread,
    truncated_importance_weights,
)
from nemo_edo.losses.policy_gradient import (
    cispo_config,
    clip_cov_selection,
    dapo_config,
    dr_grpo_config,
    grpo_exploration,
    grpo_loss,
    gspo_config,
    kl_cov_selection,
    ppo_clip_loss,
    reinforce_config,
    token_covariances,
)
from nemo_edo.losses.preference import (
    dpo_loss,
    ed_idpo_loss,
    ipo_loss,
    preference_loss,
    preference_metrics,
    ranking_nce_loss,
    selm_loss,
    sequence_logprobs,
    vpo_loss,
    xpo_loss,
)
from nemo_edo.losses.schedules import Schedule, build_schedule
from nemo_edo.losses.term import LossTerm, entropy_bonus, kl_per_token, reduce_tokens, reduction_count, sft_loss
