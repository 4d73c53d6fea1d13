"""Estimates of the KL to the reference policy from sampled tokens.

Schulman 2020, "Approximating KL divergence"; for their gradients, Tang and Munos 2025, "On a few pitfalls in KL
divergence gradient estimation for RL".
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_edo.config.losses import KL_ESTIMATORS


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(pi_theta || pi_ref) at each token, in nats, not reduced (Schulman 2020: k1, k2, k3).

    With d = log pi_theta - log pi_ref on a token sampled from pi_theta:

    - "k1" = d: unbiased. Its gradient is zero in expectation: minimising it alone descends no KL.
    - "k2" = d^2 / 2: biased. Its gradient descends the reverse KL(pi_theta || pi_ref).
    - "k3" = exp(-d) - 1 + d: unbiased, never negative. Its gradient descends the forward KL(pi_ref || pi_theta).
    - "k1+" and "k3+": the value of k1 or k3, unbiased, with the gradient of k2, which descends the reverse
      KL(pi_theta || pi_ref) (straight-through; the names are verl's).

    Those gradients are in expectation over tokens from pi_theta, taken through the value and not through sampling.
    logprobs: natural log-probabilities of the sampled tokens under pi_theta, of any shape, which the result keeps.
    ref_logprobs: under pi_ref, a constant.
    Raises ValueError for shapes that differ or an unknown estimator. The caller, who knows the padding,
    refuses values that are not finite: k3 overflows where pi_theta is far below pi_ref.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"ref_logprobs has shape {tuple(ref_logprobs.shape)}, but logprobs {tuple(logprobs.shape)}")
    d = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(-d) + d  # exp(-d) - 1 would cancel to noise, and below zero, for small d
    if estimator in ("k1+", "k3+"):
        value = kl_per_token(logprobs, ref_logprobs, estimator.removesuffix("+")).detach()
        k2 = kl_per_token(logprobs, ref_logprobs, "k2")
        return value + (k2 - k2.detach())  # the bracket is exactly 0: the value stays k1's or k3's to the last bit
    raise ValueError(f"estimator is {estimator!r}, expected one of {', '.join(KL_ESTIMATORS)}")
