"""Entropy of a distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_edo.parallel import vocab_parallel_logprobs_and_entropy


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Exact entropy in nats of p = softmax(logits / temperature) over the last dimension: [..., V] -> [...].

    H = -sum_v p_v log p_v, from 0 to log V. Computed and returned in fp32 for half-precision logits, otherwise in
    the logits' type; differentiable once. A logit of -inf is an outcome of probability 0. No copy of the logits in fp32
    is made, only of one chunk; the backward pass makes the gradient, in the logits' type.
    Raises ValueError for no vocabulary, logits that are not floating, NaN, +inf or -inf alone at a position, and a
    temperature that is not positive.
    """
    single = torch.finfo(torch.float32)
    if not single.tiny <= temperature <= single.max:
        raise ValueError(f"temperature is {temperature}, expected a number above 0, within the range of fp32")
    if logits.ndim == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating [..., V], V > 0")
    highest = logits.detach().amax(dim=-1)
    wrong = highest[~torch.isfinite(highest)]
    if wrong.numel():
        found = "NaN" if wrong.isnan().any() else "+inf" if wrong.isposinf().any() else "nothing but -inf"
        raise ValueError(f"logits hold {found}; {wrong.numel()} of {highest.numel()} positions have no distribution")
    no_target = torch.zeros_like(highest, dtype=torch.int64)
    return vocab_parallel_logprobs_and_entropy(logits, no_target, vocab_start=0, group=None, temperature=temperature)[1]
