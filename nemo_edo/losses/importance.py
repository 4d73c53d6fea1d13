"""Importance weights for tokens that another policy than the intended one has sampled.

The generation server's pi_gen differs from the trainer's pi_old by its kernels and its precision, and samples may come
from another policy mu altogether. The behaviour policy is the one that sampled. All weights are constants: no gradient
flows through them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_edo.config import GRPOLossConfig
from nemo_edo.losses.checks import checked, one_check, require_finite
from nemo_edo.losses.kl import kl_per_token
from nemo_edo.losses.term import LossTerm, read_tokens, token_mean

CHI2_BOUND = 20.0
"""Nats. The log-ratio of a long response may be hundreds, and the square of its ratio beyond all numbers."""


@checked
def truncated_importance_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float, level: str = "token"
) -> Tensor:
    """min(pi / behavior, cap), detached: [B, T], 0 at padding.

    TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training") with pi = pi_old and
    behavior = pi_gen; with behavior = mu, the weights of ``exploration_term`` for samples of mu.

    logprobs, behavior_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi and the policy that
        sampled them.
    mask: [B, T], 1 where a response token counts.
    level: "token", a ratio for each token; "sequence", the ratio of the whole response, exp of the sum of its tokens'
        log-ratios, at each of its tokens.
    Truncation comes first, in log space, so that no ratio overflows.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, a cap that is not finite and above 0,
    and an unknown level.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    return _truncated(_at_level(log_ratio, level), valid, cap)


def _truncated(log_ratio: Tensor, valid: Tensor, cap: float) -> Tensor:
    if not 0 < cap <= torch.finfo(log_ratio.dtype).max:
        raise ValueError(f"cap is {cap}, expected a number above 0 that is finite in {log_ratio.dtype}")
    log_cap = math.log(cap)
    weights = log_ratio.clamp(max=log_cap).exp()
    weights = torch.where(log_ratio < log_cap, weights, cap)  # exp(log(cap)) alone may miss the cap by a rounding
    return torch.where(valid, weights, 0.0)


@checked
def icepop_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, low: float, high: float, level: str = "token"
) -> Tensor:
    """k = pi / behavior where low <= k <= high, otherwise 0; detached: [B, T], 0 at padding.

    IcePop (Ling team 2025, "Every step evolves: scaling reinforcement learning for trillion-scale thinking model"):
    M(k) = k within the bounds and 0 outside, with pi = pi_old and behavior = pi_gen. A token outside the bounds does
    not train; one inside is weighted by its ratio, not by 1. Their bounds are 0.5 and 5. With level "sequence" and low
    0, responses above a cap are left out instead of truncated (TRL's sequence_mask).

    Arguments as for ``truncated_importance_weights``. Multiplied into token values, the weights leave the count of a
    ``LossTerm`` as it is: a token that is dropped still counts.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, and bounds other than
    0 <= low < high, high finite.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    return _within(_at_level(log_ratio, level), valid, low, high)


def _within(log_ratio: Tensor, valid: Tensor, low: float, high: float) -> Tensor:
    _check_bounds(low, high, log_ratio)
    ratio = log_ratio.exp()  # an overflow is infinity: outside, as it should be
    return torch.where(valid & (ratio >= low) & (ratio <= high), ratio, 0.0)


@checked
def sequence_masked_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, low: float, high: float
) -> Tensor:
    """k = pi / behavior at each token of a response whose geometric mean of k is in [low, high], otherwise 0; detached:
    [B, T], 0 at padding.

    Sequence-masked TIS (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch"; NeMo-RL's seq-mask-tis): a response that its sampler's numbers fit badly does not
    train at all, and the tokens of the others have their own ratios, which nothing truncates. The bounds are close to
    1: 0.999 and 1.002.
    Arguments as for ``truncated_importance_weights``.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, bounds other than 0 <= low < high, high
    finite, and a ratio that overflows in a response that trains.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    return _of_kept_sequences(log_ratio, valid, low, high)


def _of_kept_sequences(log_ratio: Tensor, valid: Tensor, low: float, high: float) -> Tensor:
    _check_bounds(low, high, log_ratio)
    mean_B = log_ratio.sum(dim=1) / valid.sum(dim=1).clamp(min=1)
    kept_B = (mean_B.exp() >= low) & (mean_B.exp() <= high)
    weights = torch.where(kept_B[:, None] & valid, log_ratio.exp(), 0.0)
    require_finite("the ratio exp(logprobs - behavior_logprobs)", weights)
    return weights


def sampler_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor | None, valid: Tensor, config: GRPOLossConfig
) -> tuple[Tensor, dict[str, LossTerm]]:
    """[B, T] constants that lead from pi_gen's samples to pi_old's as config.sampler_correction says, ones without a
    correction; and their metrics (``policy_gradient.grpo_loss``).

    old_logprobs, sampler_logprobs: [B, T] under pi_old and pi_gen, as ``read_tokens`` gives them; None: none are known.
    Raises ValueError for a correction without sampler_logprobs, and for ratios that overflow.
    """
    correction = config.sampler_correction
    if sampler_logprobs is None:
        if correction != "none":
            raise ValueError(
                f"sampler_logprobs is None, but sampler_correction is {correction!r}: give the sampler's "
                "log-probabilities of the tokens, or set sampler_correction to none"
            )
        return torch.ones_like(old_logprobs), {}
    log_ratio = old_logprobs - sampler_logprobs
    metrics = _gap(log_ratio, valid)
    if correction == "none":
        return torch.ones_like(old_logprobs), metrics
    at_level = _at_level(log_ratio, config.sampler_level)
    if correction == "tis":
        weights = _truncated(at_level, valid, config.tis_cap)
        bounded = at_level > math.log(config.tis_cap)
    elif correction == "icepop":
        weights = _within(at_level, valid, config.icepop_low, config.icepop_high)
        bounded = weights == 0
    else:
        weights = _of_kept_sequences(log_ratio, valid, config.sequence_mask_low, config.sequence_mask_high)
        bounded = weights == 0
    return weights, {
        **metrics,
        "sampler_weight": token_mean(weights, valid),
        "sampler_bounded": token_mean(bounded, valid),
    }


@checked
def sampler_gap(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, LossTerm]:
    """How far the sampler pi_gen is from the trainer's view of it, pi_old: means over valid tokens (count = tokens).

    logprobs, sampler_logprobs: [B, T] natural log-probabilities of pi_gen's tokens under pi_old and pi_gen.
    mask: [B, T], 1 where a response token counts.

    - "sampler_gap": |log pi_old - log pi_gen|, in nats.
    - "sampler_ratio": pi_old / pi_gen; 1 in expectation.
    - "sampler_kl_k1", "sampler_kl_k3": estimates of KL(pi_gen || pi_old) in nats (``kl_per_token``, Schulman 2020).

    No gradients. Raises ValueError for shapes that differ, NaN or infinity at a valid token, and ratios that overflow.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    return _gap(log_ratio, valid)


def _gap(log_ratio: Tensor, valid: Tensor) -> dict[str, LossTerm]:
    ratio = log_ratio.exp()
    require_finite("the ratio exp(logprobs - sampler_logprobs)", ratio)
    zero = torch.zeros_like(log_ratio)
    values = {
        "sampler_gap": log_ratio.abs(),
        "sampler_ratio": ratio,
        "sampler_kl_k1": kl_per_token(-log_ratio, zero, "k1"),
        "sampler_kl_k3": kl_per_token(-log_ratio, zero, "k3"),
    }
    return {name: token_mean(values_BT, valid) for name, values_BT in values.items()}


def sampler_mismatch(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the sampler pi_gen is from the trainer's pi_old over all tokens of a collection, as numbers to log.

    Arguments as for ``sampler_gap``, and its means under its names; also, over the valid tokens:

    - "sampler_gap_max": the largest |log pi_old - log pi_gen|, in nats.
    - "sampler_ratio_p1", "sampler_ratio_p50", "sampler_ratio_p99", "sampler_ratio_max": of the ratio pi_old / pi_gen;
      percentiles are interpolated linearly between order statistics.
    - "sampler_chi2": mean(ratio^2) - 1, an estimate of chi^2(pi_old || pi_gen), ratios cut off at exp(+-20), as verl
      does; 0 without a mismatch.
    - "sampler_ess": the effective sample size of the ratios, sum(ratio)^2 / sum(ratio^2), as a share of the tokens
      (Kish 1965); 1 without a mismatch.
    - "sampler_chi2_sequence", "sampler_ess_sequence": the same of the responses' ratios, the products of their tokens'.

    In float64, from sorted values, so that no order of rows changes a bit. A ratio that overflows is infinity, and so
    are the means that include it: the gap, which a guard checks, chi2 and the effective sample sizes stay finite.
    Raises ValueError for shapes that differ, an empty mask, and NaN or infinity at a valid token.
    """
    with one_check():
        valid_BT, log_ratio_BT = _read(
            mask, "error", logprobs=logprobs.double(), sampler_logprobs=sampler_logprobs.double()
        )
    log_ratio_N = np.sort(log_ratio_BT[valid_BT].numpy(force=True))
    log_ratio_B = np.sort(log_ratio_BT.sum(dim=1)[valid_BT.any(dim=1)].numpy(force=True))
    with np.errstate(over="ignore"):
        ratio_N = np.exp(log_ratio_N)
        k3 = np.mean(np.expm1(log_ratio_N) - log_ratio_N)
    chi2, chi2_sequence = (
        np.mean(np.expm1(2 * np.clip(values, -CHI2_BOUND, CHI2_BOUND))) for values in (log_ratio_N, log_ratio_B)
    )
    gap_N = np.abs(log_ratio_N)
    low, middle, high = np.quantile(ratio_N, (0.01, 0.5, 0.99))
    values = {
        "sampler_gap": gap_N.mean(),
        "sampler_gap_max": gap_N.max(),
        "sampler_ratio": ratio_N.mean(),
        "sampler_ratio_p1": low,
        "sampler_ratio_p50": middle,
        "sampler_ratio_p99": high,
        "sampler_ratio_max": ratio_N[-1],
        "sampler_kl_k1": -log_ratio_N.mean(),
        "sampler_kl_k3": k3,
        "sampler_chi2": chi2,
        "sampler_ess": _effective_share(log_ratio_N),
        "sampler_chi2_sequence": chi2_sequence,
        "sampler_ess_sequence": _effective_share(log_ratio_B),
    }
    return {name: float(value) for name, value in values.items()}


def _effective_share(log_weights_N: np.ndarray) -> float:
    """sum(w)^2 / (N sum(w^2)) from sorted log-weights; the largest weight is divided out, so that none overflows."""
    weights_N = np.exp(log_weights_N - log_weights_N[-1])
    return weights_N.sum() ** 2 / (len(weights_N) * np.square(weights_N).sum())


def _at_level(log_ratio: Tensor, level: str) -> Tensor:
    """[B, T]: each token's log-ratio, or that of its whole response, the sum over its tokens."""
    if level not in ("token", "sequence"):
        raise ValueError(f"level is {level!r}, expected token or sequence")
    return log_ratio if level == "token" else log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


def _check_bounds(low: float, high: float, log_ratio: Tensor) -> None:
    if not 0 <= low < high <= torch.finfo(log_ratio.dtype).max:
        raise ValueError(f"low and high are {low} and {high}, expected 0 <= low < high, high finite")


def _read(mask: Tensor, on_empty: str = "zero", **logprobs_BT: Any) -> tuple[Tensor, Tensor]:
    """Which tokens count, and the first minus the second of two named [B, T] tensors, detached."""
    valid, (first, second) = read_tokens(mask, on_empty, **logprobs_BT)
    return valid, (first - second).detach()
