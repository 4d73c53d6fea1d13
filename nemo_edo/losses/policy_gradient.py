"""ED-GRPO: GRPO's clipped surrogate (Shao et al. 2024), the KL to the reference policy, and exploration.

The paper's ED-GRPO equation prints an argmin over the surrogate without its minus sign. Here everything is minimised:

    L = - surrogate + beta * KL(pi_theta || pi_ref) + alpha * beta * E_{pi_old}[log pi_theta - log pi_old]

with one aggregation for the three terms.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nemo_edo.config import GRPOLossConfig
from nemo_edo.losses.exploration import exploration_term, floor_share
from nemo_edo.losses.kl import kl_per_token
from nemo_edo.losses.term import LossTerm, per_token, reduce_tokens, require_finite, without_padding


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    config: GRPOLossConfig,
) -> tuple[LossTerm, dict[str, LossTerm]]:
    """The minimised ED-GRPO loss and its metrics; with an exploration weight of 0, GRPO to the last bit.

    logprobs, old_logprobs, ref_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta, under
        pi_old, which produced them, and under pi_ref. The gradient flows through the first alone. ref_logprobs may be
        None if config.beta is 0.
    advantages: [B], one for each response, or [B, T].
    mask: [B, T], 1 where a response token counts.

    The loss, and the metrics policy_loss (the negated surrogate), kl (the estimate, without beta; absent without
    ref_logprobs) and exploration (log-ratio with the floor, without its weight), are reduced by config.aggregation:
    count = sequences, or tokens for token-mean. The metrics log_ratio (log pi_theta - log pi_old), clip_fraction and
    floor_fraction are means over valid tokens. No metric has a gradient.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, ratios that overflow, and a missing
    reference. Warns of k1 with exploration, which is GRPO with another beta.
    """
    _warn_of_k1(config)
    advantages, logprobs, old_logprobs = without_padding(
        mask, advantages=per_token(advantages.detach(), mask), logprobs=logprobs, old_logprobs=old_logprobs.detach()
    )
    log_ratio = logprobs - old_logprobs
    surrogate, clipped = clipped_surrogate(log_ratio, advantages, config)
    loss = policy_loss = reduce_tokens(-surrogate, mask, config.aggregation, config.norm_length)
    metrics = {
        "policy_loss": policy_loss.detached(),
        "log_ratio": reduce_tokens(log_ratio.detach(), mask, "token-mean"),
        "clip_fraction": reduce_tokens(clipped.to(log_ratio.dtype), mask, "token-mean"),
        "floor_fraction": floor_share(logprobs, old_logprobs, mask, config.log_ratio_floor),
    }

    if ref_logprobs is not None:
        (ref_logprobs,) = without_padding(mask, ref_logprobs=ref_logprobs.detach())
        kl_BT = kl_per_token(logprobs, ref_logprobs, config.kl_estimator)
        require_finite("the KL estimate from logprobs - ref_logprobs", kl_BT)
        kl = reduce_tokens(kl_BT, mask, config.aggregation, config.norm_length)
        metrics["kl"] = kl.detached()
        loss = loss.plus(kl, config.beta) if config.beta > 0 else loss
    elif config.beta > 0:
        raise ValueError(f"ref_logprobs is None, but beta is {config.beta}: give them, or set beta to 0")

    exploration = exploration_term(
        logprobs,
        old_logprobs,
        mask,
        reduction=config.aggregation,
        log_ratio_floor=config.log_ratio_floor,
        norm_length=config.norm_length,
    )
    metrics["exploration"] = exploration.detached()
    if config.exploration_weight != 0:  # adding 0 * term would not be bit-equal to GRPO
        loss = loss.plus(exploration, config.exploration_weight)
    return loss, metrics


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, config: GRPOLossConfig) -> tuple[Tensor, Tensor]:
    """min(ratio A, clip(ratio) A) at each token, to be maximised, and where the clip holds it (its gradient is zero).

    With dual_clip, a negative advantage's surrogate is at least dual_clip * A (Ye et al. 2020, eq. 5).
    """
    ratio = log_ratio.exp()
    require_finite("the ratio exp(logprobs - old_logprobs)", ratio)
    unclipped = ratio * advantages
    surrogate = torch.minimum(unclipped, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages)
    held = surrogate < unclipped
    if config.dual_clip is not None:
        bound = torch.where(advantages < 0, config.dual_clip * advantages, -torch.inf)
        held = held | (surrogate < bound)
        surrogate = torch.maximum(surrogate, bound)
    return surrogate, held


def _warn_of_k1(config: GRPOLossConfig) -> None:
    if config.kl_estimator == "k1" and config.exploration_weight > 0:
        warnings.warn(
            f"kl_estimator k1 with exploration weight {config.exploration_weight}: without a floor the exploration "
            "term's gradient is then the KL's own, and the loss is GRPO with beta = "
            f"{config.beta + config.exploration_weight}; k3 keeps the two apart",
            stacklevel=3,
        )
