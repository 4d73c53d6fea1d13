"""ED-GRPO: GRPO's clipped surrogate (Shao et al. 2024), the KL to the reference policy, and exploration.

The paper's ED-GRPO equation prints an argmin over the surrogate without its minus sign. Here everything is minimised:

    L = - surrogate + beta * KL(pi_theta || pi_ref) + alpha * beta * E_{pi_old}[log pi_theta - log pi_old]

with one aggregation for all terms. PPO, DAPO, Dr.GRPO, GSPO, CISPO and REINFORCE are settings of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_edo.config import GRPOLossConfig
from nemo_edo.config.checks import require
from nemo_edo.losses.exploration import (
    exploration_noise_term,
    exploration_term,
    first_tokens,
    floor_share,
    step_weight,
)
from nemo_edo.losses.importance import sampler_weights
from nemo_edo.losses.kl import kl_per_token
from nemo_edo.losses.term import (
    LossTerm,
    per_token,
    reduce_tokens,
    require_finite,
    require_tokens,
    token_mean,
    valid_tokens,
    without_padding,
)


def dapo_config(**changes: Any) -> GRPOLossConfig:
    """DAPO (Yu et al. 2025, eq. 8): a higher upper clip, the mean over all tokens, no KL. Exploration is off unless
    ``changes`` gives it: an ``exploration_coefficient``, as alpha * beta is 0 with beta 0."""
    return _variant(changes, clip_high=0.28, aggregation="token-mean", beta=0.0)


def dr_grpo_config(norm_length: int, **changes: Any) -> GRPOLossConfig:
    """Dr.GRPO (Liu et al. 2025): token sums over a constant length, no KL, and advantages without std
    (``group_advantages`` with scale "none"). Exploration as for ``dapo_config``."""
    return _variant(changes, aggregation="seq-mean-token-sum-norm", norm_length=norm_length, beta=0.0)


def gspo_config(**changes: Any) -> GRPOLossConfig:
    """GSPO (Zheng et al. 2025, eq. 5): one ratio for each sequence, with a range that fits its mean log-ratio; no KL.
    Exploration as for ``dapo_config``."""
    return _variant(changes, importance_sampling_level="sequence", clip_low=3e-4, clip_high=4e-4, beta=0.0)


def cispo_config(**changes: Any) -> GRPOLossConfig:
    """CISPO (MiniMax 2025, "MiniMax-M1", eq. 4): the gradient of every token's log pi_theta, weighted by its ratio;
    this has no lower bound and is cut off at 5 (Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute
    for LLMs"); the mean over all tokens, no KL. Exploration as for ``dapo_config``."""
    return _variant(changes, surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token-mean", beta=0.0)


def reinforce_config(**changes: Any) -> GRPOLossConfig:
    """REINFORCE (Williams 1992): A * log pi_theta without ratio and clip, as if every step were the first; no KL. With
    leave-one-out advantages (``group_advantages``), RLOO (Ahmadian et al. 2024). Exploration as for ``dapo_config``."""
    return _variant(changes, surrogate="reinforce", beta=0.0)


def _variant(changes: dict[str, Any], **settings: Any) -> GRPOLossConfig:
    exploration = {} if changes.get("exploration_coefficient") is not None else {"alpha": 0.0}
    return GRPOLossConfig(**{**exploration, **settings, **changes})


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    reduction: str,
    norm_length: float | None = None,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> tuple[LossTerm, dict[str, LossTerm]]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), minimised (PPO, Schulman et al. 2017, eq. 7).

    logprobs, old_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta and under pi_old,
        which produced them; ratio = pi_theta / pi_old at each token. The gradient flows through the first alone.
    advantages: [B], one for each response, or [B, T]. mask: [B, T], 1 where a response token counts.
    dual_clip: as in ``clipped_surrogate``. reduction, norm_length, rows: as in ``reduce_tokens``, where the counts are.
    on_empty: "error" or "zero", for a mask without a 1 (``term.require_tokens``).

    The metrics log_ratio (log pi_theta - log pi_old), clip_fraction, and of it clip_low_fraction, clip_high_fraction
    and clip_dual_fraction are means over valid tokens, without gradient.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, ratios that overflow, and clips or
    reductions that are out of range.
    """
    require(0 <= clip_low < 1, "clip_low", clip_low, "a number in [0, 1)")
    require(clip_high >= 0, "clip_high", clip_high, "a number of at least 0")
    require(dual_clip is None or dual_clip > 1, "dual_clip", dual_clip, "None or a number above 1")
    require_tokens(mask, on_empty)
    logprobs, old_logprobs, advantages = without_padding(
        mask, logprobs=logprobs, old_logprobs=old_logprobs.detach(), advantages=per_token(advantages.detach(), mask)
    )
    log_ratio = logprobs - old_logprobs
    surrogate, held = clipped_surrogate(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    metrics = {"log_ratio": token_mean(log_ratio, mask), **_clip_shares(held, mask)}
    return reduce_tokens(-surrogate, mask, reduction, norm_length, rows=rows, on_empty=on_empty), metrics


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    config: GRPOLossConfig,
    *,
    sampler_logprobs: Tensor | None = None,
    exploration_factors: Tensor | None = None,
    selected: Tensor | None = None,
    exploration_weight: float | None = None,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> tuple[LossTerm, dict[str, LossTerm]]:
    """The minimised ED-GRPO loss and its metrics; with exploration weight 0, GRPO (Shao et al. 2024) to the last bit.

    logprobs, old_logprobs, ref_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta, under
        pi_old, which produced them, and under pi_ref. The gradient flows through the first alone. ref_logprobs may be
        None if config.beta is 0.
    advantages: [B], one for each response, or [B, T].
    mask: [B, T], 1 where a response token counts.
    sampler_logprobs: [B, T] under pi_gen, pi_old as the generation server computed it. config.sampler_correction turns
        pi_old / pi_gen into constant weights on every term but the KL to pi_ref; with "none" they only give metrics.
    exploration_factors: [B] or [B, T] constant factors of the exploration term. No weight enters a count.
    selected: [B, T], 1 at the tokens that config.covariance_control acts on, chosen over the global batch
        (``clip_cov_selection``, ``kl_cov_selection``); required with one, refused without.
    exploration_weight: what multiplies the exploration term in this step, at least 0 (``build_schedule``); None:
        config.exploration_weight.
    rows: the sequences that the loss's count includes (``reduction_count``).
    on_empty: "error" or "zero", for a mask without a 1 (``term.require_tokens``).

    The loss, and the metrics policy_loss (the negated surrogate), kl (the estimate, without beta; absent without
    ref_logprobs), exploration (log-ratio with the floor, without its coefficient) and kl_cov (its penalty, likewise),
    are reduced by config.aggregation: count = sequences, or tokens for token-mean. The metrics log_ratio (log pi_theta
    - log pi_old), clip_fraction with its parts (``ppo_clip_loss``), floor_fraction, selected_fraction, sampler_weight,
    sampler_bounded (weights that the correction has cut off or set to 0) and those of ``sampler_gap`` are means over
    valid tokens. None has a gradient.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, ratios that overflow, and a missing
    ref_logprobs, sampler_logprobs or selected.
    """
    require_tokens(mask, on_empty)
    advantages, logprobs, old_logprobs = without_padding(
        mask, advantages=per_token(advantages.detach(), mask), logprobs=logprobs, old_logprobs=old_logprobs.detach()
    )
    weight = step_weight(config, exploration_weight)
    weights, sampler_metrics = sampler_weights(old_logprobs, sampler_logprobs, mask, config)
    loss, metrics = _policy_loss(logprobs, old_logprobs, advantages, mask, weights, selected, config, rows)
    metrics |= sampler_metrics

    if ref_logprobs is not None:
        kl = _kl_to_reference(logprobs, old_logprobs, ref_logprobs, mask, config, rows)
        metrics["kl"] = kl.detached()
        loss = loss.plus(kl, config.beta) if config.beta > 0 else loss
    elif config.beta > 0:
        raise ValueError(f"ref_logprobs is None, but beta is {config.beta}: give them, or set beta to 0")

    exploration = _exploration(logprobs, old_logprobs, mask, weights, exploration_factors, config, rows)
    metrics["exploration"] = exploration.detached()
    metrics["floor_fraction"] = floor_share(logprobs, old_logprobs, mask, config.log_ratio_floor)
    if weight != 0:  # adding 0 * term would not be bit-equal to GRPO
        loss = loss.plus(exploration, weight)
    return loss, metrics


def grpo_exploration(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    config: GRPOLossConfig,
    *,
    sampler_logprobs: Tensor | None = None,
    exploration_factors: Tensor | None = None,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> LossTerm:
    """The exploration term of ``grpo_loss`` by itself, without its coefficient: for measuring its gradient.

    Arguments, weights, reduction, count and errors are those of ``grpo_loss``.
    """
    require_tokens(mask, on_empty)
    (old_logprobs,) = without_padding(mask, old_logprobs=old_logprobs.detach())
    weights, _ = sampler_weights(old_logprobs, sampler_logprobs, mask, config)
    return _exploration(logprobs, old_logprobs, mask, weights, exploration_factors, config, rows)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """min(ratio A, clip(ratio) A) at each token, to be maximised, and where it is clipped (its gradient is zero).

    With dual_clip, a negative advantage's surrogate is at least dual_clip * A (Ye et al. 2020, eq. 5).
    Clipped by "low", the lower bound on the ratios of negative advantages, by "high", the upper one on those of
    positive ones, or by the "dual" clip: boolean tensors, of which at most one is true at a token.
    Arguments of one shape, not reduced. Raises ValueError for ratios that overflow.
    """
    ratio = log_ratio.exp()
    require_finite("the ratio exp(logprobs - old_logprobs)", ratio)
    unclipped = ratio * advantages
    surrogate = torch.minimum(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = surrogate < unclipped
    held = {"low": clipped & (advantages < 0), "high": clipped & (advantages > 0), "dual": torch.zeros_like(clipped)}
    if dual_clip is not None:
        bound = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        held["dual"] = surrogate < bound
        surrogate = torch.maximum(surrogate, bound)
    return surrogate, held


def cispo_surrogate(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """clip(ratio, 1 - clip_low, 1 + clip_high) A log pi at each token, to be maximised (MiniMax 2025, eq. 4), and where
    the ratio is cut off.

    The ratio is a constant, so that no token loses its gradient, unlike in ``clipped_surrogate``. clip_low 1: no lower
    bound. The value is not PPO's: it is that of REINFORCE, weighted.
    Arguments of one shape, not reduced. Raises ValueError for ratios that overflow.
    """
    ratio = log_ratio.detach().exp()
    require_finite("the ratio exp(logprobs - old_logprobs)", ratio)
    low, high = 1 - clip_low, 1 + clip_high
    held = {"low": ratio < low, "high": ratio > high, "dual": torch.zeros_like(ratio, dtype=torch.bool)}
    return ratio.clamp(low, high) * advantages * logprobs, held


def _surrogate(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, config: GRPOLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """[B, T], to be maximised, and where it is clipped: config.surrogate."""
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.surrogate == "cispo":
        return cispo_surrogate(logprobs, log_ratio, advantages, **clips)
    if config.surrogate == "reinforce":
        nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
        return advantages * logprobs, {"low": nowhere, "high": nowhere, "dual": nowhere}
    at_level = _sequence_log_ratio(log_ratio, mask) if config.importance_sampling_level == "sequence" else log_ratio
    return clipped_surrogate(at_level, advantages, **clips, dual_clip=config.dual_clip)


def _sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """GSPO-token's log-ratio (Zheng et al. 2025, eq. 14); [B, T].

    The value at every token is the mean of log_ratio over its sequence's valid tokens, and the gradient that of the
    token's own log pi_theta. With [B] advantages and "seq-mean-token-mean", loss and gradient are plain GSPO's.
    log_ratio: [B, T] log pi_theta - log pi_old, zero at padding.
    """
    lengths_B = valid_tokens(mask).sum(dim=1).clamp(min=1)
    mean_B = log_ratio.detach().sum(dim=1) / lengths_B
    return per_token(mean_B, mask) + (log_ratio - log_ratio.detach())


def _policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    selected: Tensor | None,
    config: GRPOLossConfig,
    rows: str,
) -> tuple[LossTerm, dict[str, LossTerm]]:
    """The negated surrogate under the covariance control, and its metrics.

    Our clip stays on with KL-Cov too, whose authors take the unclipped surrogate for all tokens.
    """
    log_ratio = logprobs - old_logprobs
    surrogate, held = _surrogate(logprobs, log_ratio, advantages, mask, config)
    selected = _selected_tokens(selected, mask, config.covariance_control)
    if selected is not None and config.covariance_control == "clip-cov":  # Cui et al. 2025, eq. 12
        surrogate = torch.where(selected, surrogate.detach(), surrogate)
    loss = _reduced(-weights * surrogate, mask, config, rows)
    metrics = {
        "policy_loss": loss.detached(),
        "log_ratio": token_mean(log_ratio, mask),
        **_clip_shares(held, mask),
    }
    if selected is not None:
        metrics["selected_fraction"] = token_mean(selected, mask)
    # eq. 14, its KL estimated by |log-ratio| as in the authors' code
    if selected is not None and config.covariance_control == "kl-cov":
        penalty_BT = torch.where(selected, weights * log_ratio.abs(), 0.0)
        penalty = _reduced(penalty_BT, mask, config, rows)
        metrics["kl_cov"] = penalty.detached()
        loss = loss.plus(penalty, config.kl_cov_coefficient)
    return loss, metrics


def _kl_to_reference(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, config: GRPOLossConfig, rows: str
) -> LossTerm:
    (ref_logprobs,) = without_padding(mask, ref_logprobs=ref_logprobs.detach())
    kl_BT = kl_per_token(logprobs, ref_logprobs, config.kl_estimator)
    if config.kl_importance != "none":
        sampler = old_logprobs if config.kl_importance == "ratio" else logprobs.detach()
        kl_BT = (logprobs - sampler).exp() * kl_BT
    require_finite("the KL estimate from logprobs - ref_logprobs", kl_BT)
    return _reduced(kl_BT, mask, config, rows)


def _exploration(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    exploration_factors: Tensor | None,
    config: GRPOLossConfig,
    rows: str,
) -> LossTerm:
    if exploration_factors is not None:
        (factors,) = without_padding(mask, exploration_factors=per_token(exploration_factors.detach(), mask))
        weights = weights * factors
    if config.exploration_tokens is not None:
        weights = weights * first_tokens(mask, config.exploration_tokens)
    term = exploration_noise_term if config.exploration_control == "noise" else exploration_term
    return term(
        logprobs,
        old_logprobs,
        mask,
        reduction=config.aggregation,
        log_ratio_floor=config.log_ratio_floor,
        weights=weights,
        norm_length=config.norm_length,
        rows=rows,
        on_empty="zero",
    )


def _selected_tokens(selected: Tensor | None, mask: Tensor, control: str) -> Tensor | None:
    """[B, T] bool, False at padding; None without a covariance control."""
    if control == "none":
        if selected is not None:
            raise ValueError("selected is given, but covariance_control is none: leave it out, or name the control")
        return None
    if selected is None:
        raise ValueError(f"selected is None, but covariance_control is {control!r}: give the tokens that it acts on")
    (selected_BT,) = without_padding(mask, selected=selected)
    if not ((selected_BT == 0) | (selected_BT == 1)).all():
        raise ValueError("selected has values other than 0 and 1")
    return selected_BT == 1


def _clip_shares(held: dict[str, Tensor], mask: Tensor) -> dict[str, LossTerm]:
    """clip_fraction, and of it the share of each bound: no token is clipped by two."""
    shares = {f"clip_{bound}_fraction": token_mean(at_BT, mask) for bound, at_BT in held.items()}
    return {"clip_fraction": token_mean(torch.stack(list(held.values())).any(dim=0), mask), **shares}


def _reduced(values_BT: Tensor, mask: Tensor, config: GRPOLossConfig, rows: str) -> LossTerm:
    """As every term of the loss is; whether the mask may be empty has been checked."""
    return reduce_tokens(values_BT, mask, config.aggregation, config.norm_length, rows=rows, on_empty="zero")
