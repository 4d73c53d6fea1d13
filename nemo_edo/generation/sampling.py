"""Sampling of the next token, by random numbers that depend on the request only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_edo.types import SamplingParams


def request_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """[B, length] float32 uniforms in [0, 1): row b depends on ``seeds[b]`` alone (a Philox counter each).

    So a request gets the same response whatever else is in its batch, and on any rank.
    """
    bits = np.random.Philox(key=0)
    generator, state = np.random.Generator(bits), bits.state
    rows = np.empty((len(seeds), length), dtype=np.float32)
    for row, seed in zip(rows, seeds, strict=True):
        state["state"]["key"][:] = seed % 2**64, seed >> 64  # the state of Philox(key=seed), without its construction
        bits.state = state
        generator.random(out=row, dtype=np.float32)
    return torch.from_numpy(rows)


def choose_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Samples a token for each row by inverting the cumulative distribution at its uniform number.

    logits: [B, V]; uniforms: [B] in [0, 1). Temperature 0 takes the most likely token (the first of equals).
    Returns (tokens [B] int64, log-probabilities [B] float32). The log-probability is that of the
    temperature-scaled softmax over the whole vocabulary, before any top-p cut: what a trainer recomputes.
    """
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    elif sampling.top_p < 1:
        probs, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
        before = probs.cumsum(dim=-1) - probs
        kept = probs.masked_fill(before >= sampling.top_p, 0.0)  # the first token always stays
        tokens = order.gather(-1, _invert(kept, uniforms)[:, None]).squeeze(-1)
    else:
        tokens = _invert(logprobs.exp(), uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds the uniform's share of the total: never one of
    probability zero."""
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = uniforms.to(probs.device)[:, None] * total
    # Rounding can carry a target up to the total, which no cumulative probability exceeds.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, torch.minimum(target, below_total), right=True).squeeze(-1)
