"""Entropy of the next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Exact entropy in nats of softmax(logits) over the last dimension: [..., V] -> [...], from 0 to log V.

    Computed in fp32 for half-precision logits. A logit of -inf is an outcome of probability 0.
    """
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    # 0 * -inf would be NaN; 0 times the lowest finite number is the limit, 0.
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)
