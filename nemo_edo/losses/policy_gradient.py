"""ED-GRPO: GRPO's clipped surrogate (Shao et al. 2024), the KL to the reference policy, and exploration.

The paper's ED-GRPO equation prints an argmin over the surrogate without its minus sign. Here everything is minimised:

    L = - surrogate + beta * KL(pi_theta || pi_ref) + alpha * beta * E_{pi_old}[log pi_theta - log pi_old]

with one aggregation for all terms. PPO, DAPO, Dr.GRPO, GSPO, CISPO and REINFORCE are settings of it.
"""

from typing import Any

import torch
from torch import Tensor

from nemo_edo.config import GRPOLossConfig
from nemo_edo.config.checks import require
from nemo_edo.losses import exploration
from nemo_edo.losses.checks import checked, constant, one_check, require_finite, require_values
from nemo_edo.losses.importance import sampler_weights
from nemo_edo.losses.term import LossTerm, Reduction, kl_per_token, per_token, read_tokens, token_means


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
    """CISPO (MiniMax 2025, eq. 4): the gradient of every token's log pi_theta, weighted by its ratio;
    this has no lower bound and is cut off at 5 (Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute
    for LLMs"); the mean over all tokens, no KL. Exploration as for ``dapo_config``."""
    return _variant(changes, surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token-mean", beta=0.0)


def reinforce_config(**changes: Any) -> GRPOLossConfig:
    """REINFORCE (Williams 1992): A * log pi_theta without ratio and clip, as if every step were the first; no KL. With
    leave-one-out advantages (``group_advantages``), RLOO (Ahmadian et al. 2024). Exploration as for ``dapo_config``."""
    return _variant(changes, surrogate="reinforce", beta=0.0)


def _variant(changes: dict[str, Any], **settings: Any) -> GRPOLossConfig:
    off = {} if changes.get("exploration_coefficient") is not None else {"alpha": 0.0}
    return GRPOLossConfig(**{**off, **settings, **changes})


@checked
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
    dual_clip: as in ``clipped_surrogate``. reduction, norm_length, rows, on_empty: as in ``reduce_tokens``.

    The metrics log_ratio (log pi_theta - log pi_old), clip_fraction, and of it clip_low_fraction, clip_high_fraction
    and clip_dual_fraction are means over valid tokens, without gradient.
    Raises ValueError as ``reduce_tokens`` does, for ratios that overflow, and for clips out of range.
    """
    require(0 <= clip_low < 1, "clip_low", clip_low, "a number in [0, 1)")
    require(clip_high >= 0, "clip_high", clip_high, "a number of at least 0")
    require(dual_clip is None or dual_clip > 1, "dual_clip", dual_clip, "None or a number above 1")
    valid, (logprobs, old_logprobs, advantages) = read_tokens(
        mask,
        on_empty,
        logprobs=logprobs,
        old_logprobs=constant("old_logprobs", old_logprobs),
        advantages=per_token(advantages.detach(), mask),
    )
    log_ratio = logprobs - old_logprobs
    surrogate, held = clipped_surrogate(
        log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    metrics = token_means({"log_ratio": log_ratio, **_clipped(held)}, valid)
    return Reduction(valid, reduction, norm_length, rows)(-surrogate), metrics


@checked
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
        pi_old, which produced them, and under pi_ref (None only if config.beta is 0). The gradient flows through the
        first alone.
    advantages: [B], one for each response, or [B, T]. mask: [B, T], 1 where a response token counts.
    sampler_logprobs: [B, T] under pi_gen, pi_old as the generation server computed it. config.sampler_correction turns
        pi_old / pi_gen into constant weights on every term but the KL to pi_ref; with "none" they only give metrics.
    exploration_factors: [B] or [B, T] constant factors of the exploration term. No weight enters a count.
    selected: [B, T], 1 at the tokens that config.covariance_control acts on, chosen over the global batch
        (``clip_cov_selection``, ``kl_cov_selection``); required with one, refused without.
    exploration_weight: what multiplies the exploration term in this step, at least 0 (``build_schedule``); None:
        config.exploration_weight.
    rows, on_empty: as in ``reduce_tokens``.

    The loss, and the metrics policy_loss (the negated surrogate), kl (the estimate, without beta; absent without
    ref_logprobs), exploration (log-ratio with the floor, without its coefficient) and kl_cov (its penalty, likewise),
    are reduced by config.aggregation: count = sequences, or tokens for token-mean. The metrics log_ratio (log pi_theta
    - log pi_old), clip_fraction with its parts (``ppo_clip_loss``), floor_fraction, selected_fraction, sampler_weight,
    sampler_bounded (weights that the correction has cut off or set to 0) and those of ``sampler_gap`` are means over
    valid tokens. None has a gradient.
    Raises ValueError as ``reduce_tokens`` does, for ratios that overflow, and for a missing ref_logprobs,
    sampler_logprobs or selected.
    """
    weight = exploration.step_weight(config, exploration_weight)
    valid, (advantages, logprobs, old_logprobs, ref_logprobs, sampler_logprobs, factors, selected) = read_tokens(
        mask,
        on_empty,
        advantages=per_token(advantages.detach(), mask),
        logprobs=logprobs,
        old_logprobs=constant("old_logprobs", old_logprobs),
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),
        sampler_logprobs=None if sampler_logprobs is None else sampler_logprobs.detach(),
        exploration_factors=None if exploration_factors is None else per_token(exploration_factors.detach(), mask),
        selected=selected,
    )
    reduced = Reduction(valid, config.aggregation, config.norm_length, rows)
    log_ratio = logprobs - old_logprobs
    weights, sampler_metrics = sampler_weights(old_logprobs, sampler_logprobs, valid, config)

    surrogate, held = _surrogate(logprobs, log_ratio, advantages, valid, config)
    selected = _selected_tokens(selected, config.covariance_control)
    if selected is not None and config.covariance_control == "clip-cov":  # Cui et al. 2025, eq. 12
        surrogate = torch.where(selected, surrogate.detach(), surrogate)
    # Each term's values, which are reduced together, and its factor in the loss. Where that is 0 the term is a metric
    # alone: adding 0 * term would not be bit-equal to GRPO.
    terms, factor_of = {"policy_loss": -exploration.weighted(surrogate, weights)}, {"policy_loss": 1.0}
    # eq. 14, its KL estimated by |log-ratio| as in the authors' code, who take the unclipped surrogate for all tokens;
    # our clip stays on.
    if selected is not None and config.covariance_control == "kl-cov":
        terms["kl_cov"] = torch.where(selected, exploration.weighted(log_ratio.abs(), weights), 0.0)
        factor_of["kl_cov"] = config.kl_cov_coefficient
    if ref_logprobs is not None:
        trained = logprobs if config.beta > 0 else logprobs.detach()
        kl_BT = kl_per_token(trained, ref_logprobs, config.kl_estimator)
        if config.kl_importance != "none":
            sampler = old_logprobs if config.kl_importance == "ratio" else logprobs.detach()
            kl_BT = (trained - sampler).exp() * kl_BT
        require_finite("the KL estimate from logprobs - ref_logprobs", kl_BT)
        terms["kl"], factor_of["kl"] = kl_BT, config.beta
    elif config.beta > 0:
        raise ValueError(f"ref_logprobs is None, but beta is {config.beta}: give them, or set beta to 0")
    trained = log_ratio if weight != 0 else log_ratio.detach()
    terms["exploration"], factor_of["exploration"] = _exploration(trained, valid, weights, factors, config), weight

    reduced_terms = dict(zip(terms, reduced.each(list(terms.values())), strict=True))
    loss = reduced_terms["policy_loss"]
    for name in list(terms)[1:]:
        if factor_of[name] != 0:
            loss = loss.plus(reduced_terms[name], factor_of[name])
    means = {name: term.detached() for name, term in reduced_terms.items()}
    shares = {**_clipped(held), **({} if selected is None else {"selected_fraction": selected})}
    return loss, {**means, **_token_metrics(log_ratio, shares, valid, factors, config), **sampler_metrics}


def _token_metrics(
    log_ratio: Tensor, shares: dict[str, Tensor], valid: Tensor, factors: Tensor | None, config: GRPOLossConfig
) -> dict[str, LossTerm]:
    """Means over the valid tokens, and the floor's share of those in the exploration term."""
    tokens = {"log_ratio": log_ratio, **shares}
    floor = {"floor_fraction": exploration.below_floor(log_ratio, config.log_ratio_floor)}
    in_term = valid if factors is None else valid & (factors != 0)
    if config.exploration_tokens is not None:
        in_term = in_term & exploration.first_tokens(valid, config.exploration_tokens)
    if in_term is valid:  # all of them: one reduction
        return token_means({**tokens, **floor}, valid)
    return {**token_means(tokens, valid), **token_means(floor, in_term)}


@checked
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
    """The exploration term of ``grpo_loss`` by itself, without its coefficient: for measuring its gradient."""
    valid, (logprobs, old_logprobs, sampler_logprobs, factors) = read_tokens(
        mask,
        on_empty,
        logprobs=logprobs,
        old_logprobs=constant("old_logprobs", old_logprobs),
        sampler_logprobs=None if sampler_logprobs is None else sampler_logprobs.detach(),
        exploration_factors=None if exploration_factors is None else per_token(exploration_factors.detach(), mask),
    )
    weights, _ = sampler_weights(old_logprobs, sampler_logprobs, valid, config)
    reduced = Reduction(valid, config.aggregation, config.norm_length, rows)
    return reduced(_exploration(logprobs - old_logprobs, valid, weights, factors, config))


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
    bounded = ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < unclipped
    surrogate = torch.where(clipped, bounded, unclipped)  # the minimum; torch's own has a backward pass of ten kernels
    held = {"low": clipped & (advantages < 0), "high": clipped & (advantages > 0), "dual": torch.zeros_like(clipped)}
    if dual_clip is not None:
        bound = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        held["dual"] = surrogate < bound
        surrogate = torch.where(held["dual"], bound, surrogate)
    return surrogate, held


def _surrogate(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, valid: Tensor, config: GRPOLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """[B, T], to be maximised, and where it is clipped: config.surrogate."""
    if config.surrogate == "cispo":
        # clip(ratio) A log pi (MiniMax 2025, eq. 4). The ratio is a constant, so that no token loses its gradient, and
        # clip_low 1 is no lower bound. The value is not PPO's: it is that of REINFORCE, weighted.
        ratio = log_ratio.detach().exp()
        require_finite("the ratio exp(logprobs - old_logprobs)", ratio)
        low, high = 1 - config.clip_low, 1 + config.clip_high
        held = {"low": ratio < low, "high": ratio > high, "dual": torch.zeros_like(ratio, dtype=torch.bool)}
        return ratio.clamp(low, high) * advantages * logprobs, held
    if config.surrogate == "reinforce":
        nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
        return advantages * logprobs, {"low": nowhere, "high": nowhere, "dual": nowhere}
    if config.importance_sampling_level == "sequence":
        # GSPO-token (Zheng et al. 2025, eq. 14): the value at every token is the mean over its sequence's valid tokens,
        # the gradient that of its own log pi_theta. With [B] advantages and "seq-mean-token-mean", plain GSPO's.
        mean_B = log_ratio.detach().sum(dim=1) / valid.sum(dim=1).clamp(min=1)
        log_ratio = mean_B[:, None] + (log_ratio - log_ratio.detach())
    return clipped_surrogate(
        log_ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
    )


def _exploration(
    log_ratio: Tensor, valid: Tensor, weights: Tensor | None, factors: Tensor | None, config: GRPOLossConfig
) -> Tensor:
    """[B, T]: the exploration term's values with all of config's weights."""
    if factors is not None:
        weights = exploration.weighted(factors, weights)
    if config.exploration_tokens is not None:
        first = exploration.first_tokens(valid, config.exploration_tokens)
        weights = exploration.weighted(first.to(log_ratio.dtype), weights)
    if config.exploration_control == "noise":
        weights = exploration.noise_weights(log_ratio, weights)
    return exploration.weighted_log_ratio(log_ratio, weights, config.log_ratio_floor)


def _selected_tokens(selected: Tensor | None, control: str) -> Tensor | None:
    """[B, T] bool, False at padding; None without a covariance control."""
    if control == "none":
        if selected is not None:
            raise ValueError("selected is given, but covariance_control is none: leave it out, or name the control")
        return None
    if selected is None:
        raise ValueError(f"selected is None, but covariance_control is {control!r}: give the tokens that it acts on")
    is_selected = selected == 1
    require_values(is_selected | (selected == 0), lambda: ValueError("selected has values other than 0 and 1"))
    return is_selected


def _clipped(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """clip_fraction, and each bound's share of it, by name: 1 at clipped tokens, none of which two bounds clip."""
    shares = {f"clip_{bound}_fraction": at_BT for bound, at_BT in held.items()}
    return {"clip_fraction": held["low"] | held["high"] | held["dual"], **shares}


# --- Clip-Cov and KL-Cov --------------------------------------------------------------------------------------------
#
# Cui et al. 2025: entropy falls at the rate of the covariance between log-probability and advantage, and few tokens
# carry it, which these functions select for ``grpo_loss``. Run them over the whole global batch, before it is split:
# means and ranks inside a micro-batch would make the gradient depend on the split. The log-probabilities may be those
# of pi_old, which are at hand then.


@checked
def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean log pi)(A - mean A) at each token; [B, T], zero at padding, without gradient (eq. 10).

    logprobs: [B, T] natural log-probabilities of the sampled tokens. advantages: [B] or [B, T].
    mask: [B, T], 1 where a response token counts. Both means are over all tokens with mask 1, in double precision; the
    result has the type of logprobs, and nats times the advantages' unit. Raises ValueError as ``term.read_tokens``
    does.
    """
    valid_BT, (logprobs_BT, advantages_BT) = read_tokens(
        mask, logprobs=logprobs.detach(), advantages=per_token(advantages.detach(), mask)
    )
    count = valid_BT.sum()

    def deviation(values_BT: Tensor) -> Tensor:
        values_BT = values_BT.double()
        return values_BT - values_BT.sum() / count

    covariances_BT = deviation(logprobs_BT) * deviation(advantages_BT)
    return torch.where(valid_BT, covariances_BT, 0.0).to(logprobs.dtype)


def clip_cov_selection(
    covariances: Tensor, mask: Tensor, *, share: float, low: float, high: float, seed: int
) -> Tensor:
    """The tokens that Clip-Cov removes from the policy gradient, sampled at random; [B, T] bool (eq. 11).

    covariances: [B, T] from ``token_covariances``. Eligible are valid tokens with low <= covariance <= high: absolute
    bounds, in the covariances' own unit (the authors use 1 and 5, far above the mean covariance).
    share: int(share * valid tokens) are sampled without replacement, but at least 1 if share is above 0, as in the
    authors' code; all eligible tokens where there are fewer. The seed fixes the selection.
    Raises ValueError as ``term.read_tokens`` does, for a share outside [0, 1] and for low > high.
    """
    if not low <= high:
        raise ValueError(f"low is {low}, expected a number of at most high = {high}")
    with one_check():
        valid_BT, (covariances_BT,) = read_tokens(mask, "zero", covariances=covariances)
    eligible = (valid_BT & (covariances_BT >= low) & (covariances_BT <= high)).flatten().nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)  # a CPU generator: the same selection on every device
    order = torch.randperm(len(eligible), generator=generator).to(eligible.device)
    return _at(eligible[order[: _selected_count(share, valid_BT)]], mask)


def kl_cov_selection(covariances: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The tokens that KL-Cov keeps close to pi_old, those with the highest covariances; [B, T] bool (eq. 13).

    covariances, share: as for ``clip_cov_selection``. Among equal covariances, the first in row-major order wins."""
    with one_check():
        valid_BT, (covariances_BT,) = read_tokens(mask, "zero", covariances=covariances)
    positions = valid_BT.flatten().nonzero().flatten()
    order = covariances_BT[valid_BT].argsort(descending=True, stable=True)
    return _at(positions[order[: _selected_count(share, valid_BT)]], mask)


def _selected_count(share: float, valid_BT: Tensor) -> int:
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, expected a number in [0, 1]")
    return max(int(share * int(valid_BT.sum())), 1 if share > 0 else 0)


def _at(positions: Tensor, mask: Tensor) -> Tensor:
    """[B, T] bool, True at the given row-major positions."""
    selected = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    selected[positions] = True
    return selected.view(mask.shape)
