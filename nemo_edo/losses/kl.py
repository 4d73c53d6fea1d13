"""Estimates of the KL to the reference policy from sampled tokens (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(pi_theta || pi_ref) at each token, in nats; same shape as the arguments, not reduced.

    With d = log pi_theta - log pi_ref on a token sampled from pi_theta:

    - "k1" = d: unbiased. Its gradient is zero in expectation: minimising it alone descends no KL.
    - "k2" = d^2 / 2: biased. Its gradient descends the reverse KL(pi_theta || pi_ref).
    - "k3" = exp(-d) - 1 + d: unbiased, never negative. Its gradient descends the forward KL(pi_ref || pi_theta).

    Those gradients are in expectation over tokens from pi_theta, taken through the value and not through sampling.
    ref_logprobs is a constant. Raises ValueError for shapes that differ or an unknown estimator.
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
    raise ValueError(f"estimator is {estimator!r}, expected one of k1, k2, k3")
