"""Importance weights for tokens that another policy than the intended one has sampled.

The generation server's pi_gen differs from the trainer's pi_old by its kernels and its precision, and samples may come
from another policy mu altogether. The behaviour policy is the one that sampled. All weights are constants: no gradient
flows through them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from nemo_edo.losses.kl import kl_per_token
from nemo_edo.losses.term import LossTerm, require_finite, require_tokens, token_mean, valid_tokens, without_padding


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
    if level not in ("token", "sequence"):
        raise ValueError(f"level is {level!r}, expected token or sequence")
    log_ratio = _log_ratio(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    if not 0 < cap <= torch.finfo(log_ratio.dtype).max:
        raise ValueError(f"cap is {cap}, expected a number above 0 that is finite in {log_ratio.dtype}")
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    log_cap = math.log(cap)
    weights = log_ratio.clamp(max=log_cap).exp()
    weights = torch.where(log_ratio < log_cap, weights, cap)  # exp(log(cap)) alone may miss the cap by a rounding
    return torch.where(valid_tokens(mask), weights, 0.0)


def icepop_weights(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """k = pi / behavior where low <= k <= high, otherwise 0; detached: [B, T], 0 at padding.

    IcePop (Ling team 2025, "Every step evolves: scaling reinforcement learning for trillion-scale thinking model"):
    M(k) = k within the bounds and 0 outside, with pi = pi_old and behavior = pi_gen. A token outside the bounds does
    not train; one inside is weighted by its ratio, not by 1. Their bounds are 0.5 and 5.

    Arguments as for ``truncated_importance_weights``. Multiplied into token values, the weights leave the count of a
    ``LossTerm`` as it is: a token that is dropped still counts.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, and bounds other than
    0 <= low < high, high finite.
    """
    log_ratio = _log_ratio(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    if not 0 <= low < high <= torch.finfo(log_ratio.dtype).max:
        raise ValueError(f"low and high are {low} and {high}, expected 0 <= low < high, high finite")
    ratio = log_ratio.exp()  # an overflow is infinity: outside, as it should be
    return torch.where(valid_tokens(mask) & (ratio >= low) & (ratio <= high), ratio, 0.0)


def sampler_gap(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, LossTerm]:
    """How far the sampler pi_gen is from the trainer's view of it, pi_old: means over valid tokens (count = tokens).

    logprobs, sampler_logprobs: [B, T] natural log-probabilities of pi_gen's tokens under pi_old and pi_gen.
    mask: [B, T], 1 where a response token counts.

    - "sampler_gap": |log pi_old - log pi_gen|, in nats.
    - "sampler_ratio": pi_old / pi_gen; 1 in expectation.
    - "sampler_kl_k1", "sampler_kl_k3": estimates of KL(pi_gen || pi_old) in nats (``kl_per_token``).

    No gradients. Raises ValueError for shapes that differ, NaN or infinity at a valid token, and ratios that overflow.
    """
    log_ratio = _log_ratio(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    ratio = log_ratio.exp()
    require_finite("the ratio exp(logprobs - sampler_logprobs)", ratio)
    zero = torch.zeros_like(log_ratio)
    values = {
        "sampler_gap": log_ratio.abs(),
        "sampler_ratio": ratio,
        "sampler_kl_k1": kl_per_token(-log_ratio, zero, "k1"),
        "sampler_kl_k3": kl_per_token(-log_ratio, zero, "k3"),
    }
    return {name: token_mean(values_BT, mask) for name, values_BT in values.items()}


def sampler_mismatch(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the sampler pi_gen is from the trainer's pi_old over all tokens of a collection, as numbers to log.

    Arguments as for ``sampler_gap``, and its means under its names; also, over the valid tokens:

    - "sampler_gap_max": the largest |log pi_old - log pi_gen|, in nats.
    - "sampler_ratio_p1", "sampler_ratio_p50", "sampler_ratio_p99", "sampler_ratio_max": of the ratio pi_old / pi_gen;
      percentiles are interpolated linearly between order statistics.

    In float64, from sorted values, so that no order of rows changes a bit. A ratio that overflows is infinity, and so
    are the means that include it: the gap, which a guard checks, stays finite.
    Raises ValueError for shapes that differ, an empty mask, and NaN or infinity at a valid token.
    """
    require_tokens(mask)
    log_ratio_N = np.sort(
        _log_ratio(mask, logprobs=logprobs.double(), sampler_logprobs=sampler_logprobs.double())[
            valid_tokens(mask)
        ].numpy(force=True)
    )
    with np.errstate(over="ignore"):
        ratio_N = np.exp(log_ratio_N)
        k3 = np.mean(np.expm1(log_ratio_N) - log_ratio_N)
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
    }
    return {name: float(value) for name, value in values.items()}


def _log_ratio(mask: Tensor, **logprobs_BT: Tensor) -> Tensor:
    """The first minus the second of two named [B, T] tensors, detached; 0 at padding."""
    first, second = without_padding(mask, **{name: tensor.detach() for name, tensor in logprobs_BT.items()})
    return first - second
