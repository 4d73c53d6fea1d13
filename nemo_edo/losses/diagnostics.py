"""How the tokens of a training step differ: numbers to log, none of which changes the training."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from nemo_edo.losses.checks import one_check
from nemo_edo.losses.term import read_tokens


def token_spread(logprobs: Tensor, entropies: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """The spread of a global batch's response tokens, which means of micro-batches cannot give.

    logprobs, old_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta and pi_old.
    entropies: [B, T] exact entropies of pi_theta, nats. mask: [B, T], 1 where a response token counts.

    - "entropy_p10", "entropy_p90": percentiles of the entropies, nats.
    - "ratio_mean", "ratio_std", "ratio_min", "ratio_max", "ratio_p99": of pi_theta / pi_old at each token.

    Percentiles are interpolated linearly between order statistics, and all is computed in float64 from sorted values,
    so that no order of rows changes a bit. The spread is that of the whole population.
    Raises ValueError for shapes that differ, an empty mask, and NaN or infinity at a valid token.
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
