"""What a reward is changed by before advantages are formed."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, *, max_length: float, cache_length: float) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the reward (Yu et al. 2025, eq. 13); in [-1, 0].

    With L_max = max_length and L_cache = cache_length, a response of length L gets 0 up to L_max - L_cache, then
    (L_max - L_cache - L) / L_cache, which is -1 at L_max, and -1 beyond.

    lengths: response lengths in tokens, of any shape, which the result keeps; integers give the default floating type.
    Raises ValueError for lengths that are negative or not finite, and unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length < float("inf"):
        raise ValueError(
            f"cache_length is {cache_length} and max_length {max_length}, expected 0 < cache_length <= max_length"
        )
    wrong = ~(torch.isfinite(lengths) & (lengths >= 0))
    if wrong.any():
        raise ValueError(f"lengths has {lengths[wrong].tolist()}, expected finite numbers of at least 0")
    return ((max_length - cache_length - lengths) / cache_length).clamp(-1, 0)
