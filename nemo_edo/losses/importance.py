"""Importance weights for tokens that another policy than the intended one has sampled, and how far the two differ.

The generation server's pi_gen differs from the trainer's pi_old by its kernels and its precision, and samples may come
from another policy mu altogether. The behaviour policy is the one that sampled. All weights are constants: no gradient
flows through them.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_edo.config import GRPOLossConfig
from nemo_edo.losses.checks import checked, one_check, require_finite
from nemo_edo.losses.term import LossTerm, kl_per_token, read_tokens, token_means

CHI2_BOUND = 20.0
"""Nats. The log-ratio of a long response may be hundreds, and the square of its ratio beyond all numbers."""


@checked
def truncated_importance_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float, level: str = "token"
) -> Tensor:
    """min(pi / behavior, cap), detached: [B, T], 0 at padding.

    TIS (Yao et al. 2025) with pi = pi_old and behavior = pi_gen; with behavior = mu, the weights of
    ``exploration_term`` for samples of mu.

    logprobs, behavior_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi and their sampler.
    mask: [B, T], 1 where a response token counts. cap: finite, above 0; truncation is in log space, so no ratio
    overflows.
    level: "token", a ratio for each token; "sequence", that of the whole response, exp of the sum of its log-ratios.
    Raises ValueError for other settings, and as ``term.read_tokens`` does.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    log_ratio = _at_level(log_ratio, level)
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

    IcePop (Ling team 2025) with pi = pi_old and behavior = pi_gen: a token outside the bounds does not train (but
    counts). Their bounds are 0.5 and 5. With level "sequence" and low 0, responses above a cap are left out instead of
    truncated (TRL's sequence_mask). Arguments as for ``truncated_importance_weights``; 0 <= low < high, high finite,
    otherwise ValueError.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    _check_bounds(low, high, log_ratio)
    ratio = _at_level(log_ratio, level).exp()  # an overflow is infinity: outside, as it should be
    return torch.where(valid & (ratio >= low) & (ratio <= high), ratio, 0.0)


@checked
def sequence_masked_weights(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, low: float, high: float
) -> Tensor:
    """k = pi / behavior at each token of a response whose geometric mean of k is in [low, high], otherwise 0; detached:
    [B, T], 0 at padding.

    Sequence-masked TIS (Liu et al. 2025; NeMo-RL's seq-mask-tis): a response that its sampler's numbers fit badly does
    not train at all. The bounds are close to 1: 0.999 and 1.002. Arguments as for ``icepop_weights``. Raises
    ValueError, too, for a ratio that overflows in a response that trains.
    """
    valid, log_ratio = _read(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    _check_bounds(low, high, log_ratio)
    mean_B = log_ratio.sum(dim=1) / valid.sum(dim=1).clamp(min=1)
    kept_B = (mean_B.exp() >= low) & (mean_B.exp() <= high)
    weights = torch.where(kept_B[:, None] & valid, log_ratio.exp(), 0.0)
    require_finite("the ratio exp(logprobs - behavior_logprobs)", weights)
    return weights


def sampler_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor | None, valid: Tensor, config: GRPOLossConfig
) -> tuple[Tensor | None, dict[str, LossTerm]]:
    """[B, T] constants that lead from pi_gen's samples to pi_old's as config.sampler_correction says, None without a
    correction; and their metrics (``policy_gradient.grpo_loss``). Of tensors from ``read_tokens``; sampler_logprobs:
    None where none are known, which a correction refuses (ValueError). Raises ValueError for ratios that overflow."""
    correction = config.sampler_correction
    if sampler_logprobs is None:
        if correction != "none":
            raise ValueError(
                f"sampler_logprobs is None, but sampler_correction is {correction!r}: give the sampler's "
                "log-probabilities of the tokens, or set sampler_correction to none"
            )
        return None, {}
    log_ratio = old_logprobs - sampler_logprobs
    metrics = _gap(log_ratio, valid)
    if correction == "none":
        return None, metrics
    tokens, level = (old_logprobs, sampler_logprobs, valid), config.sampler_level
    if correction == "tis":
        weights = truncated_importance_weights(*tokens, cap=config.tis_cap, level=level)
        bounded = _at_level(log_ratio, level) > math.log(config.tis_cap)
    elif correction == "icepop":
        weights = icepop_weights(*tokens, low=config.icepop_low, high=config.icepop_high, level=level)
        bounded = weights == 0
    else:
        weights = sequence_masked_weights(*tokens, low=config.sequence_mask_low, high=config.sequence_mask_high)
        bounded = weights == 0
    return weights, metrics | token_means({"sampler_weight": weights, "sampler_bounded": bounded}, valid)


@checked
def sampler_gap(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, LossTerm]:
    """How far the sampler pi_gen is from the trainer's view of it, pi_old: means over valid tokens (count = tokens).

    logprobs, sampler_logprobs: [B, T] natural log-probabilities of pi_gen's tokens under pi_old and pi_gen.
    mask: [B, T], 1 where a response token counts.

    - "sampler_gap": |log pi_old - log pi_gen|, in nats.
    - "sampler_ratio": pi_old / pi_gen; 1 in expectation.
    - "sampler_kl_k1", "sampler_kl_k3": estimates of KL(pi_gen || pi_old) in nats (``kl_per_token``).

    No gradients. Raises ValueError as ``term.read_tokens`` does, and for ratios that overflow.
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
    return token_means(values, valid)


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
    are the means that include it; the gap, which a guard checks, chi2 and the effective sample sizes stay finite.
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


def token_spread(logprobs: Tensor, entropies: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """The spread of a global batch's response tokens, which means of micro-batches cannot give; numbers to log.

    logprobs, old_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta and pi_old.
    entropies: [B, T] exact entropies of pi_theta, nats. mask: [B, T], 1 where a response token counts.

    - "entropy_p10", "entropy_p90": percentiles of the entropies, nats.
    - "ratio_mean", "ratio_std", "ratio_min", "ratio_max", "ratio_p99": of pi_theta / pi_old at each token.

    Percentiles, order of rows and errors as for ``sampler_mismatch``; the spread is that of the whole population.
    """
    with one_check():
        valid, tensors = read_tokens(mask, logprobs=logprobs, entropies=entropies, old_logprobs=old_logprobs)
    logprobs_N, entropies_N, old_logprobs_N = (tensor[valid].double().numpy(force=True) for tensor in tensors)
    ratios_N = np.sort(np.exp(logprobs_N - old_logprobs_N))
    low, high = np.quantile(entropies_N, (0.1, 0.9))
    spread = {
        "entropy_p10": low,
        "entropy_p90": high,
        "ratio_mean": ratios_N.mean(),
        "ratio_std": ratios_N.std(),
        "ratio_min": ratios_N[0],
        "ratio_max": ratios_N[-1],
        "ratio_p99": np.quantile(ratios_N, 0.99),
    }
    return {name: float(value) for name, value in spread.items()}


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
