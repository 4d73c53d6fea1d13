"""Megatron's self-attention for layers without Transformer Engine, which rotates keys before they are cached.

Megatron's own rotates every cached key again at each new token, and knows no positions that restart in a row. Here a
cache holds keys as they are used, so that prompts are stored once, and a pack may share its prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from nemo_edo.megatron.cpu.attention import SDPAttention
from nemo_edo.megatron.cpu.prompt_cache import PromptCacheContext
from nemo_edo.megatron.shared_prompts import SharedPrompts

Turns = tuple[Tensor, Tensor]
"""Cosines and sines [s, 1, 1, d / 2] of the angles of positions."""


def turns(angles: Tensor, scale: float, dtype: torch.dtype) -> Turns:
    """Of angles [s, 1, 1, d], twice the same d / 2 of them, as Megatron's RotaryEmbedding gives them. scale: of what
    they rotate (YaRN's concentration)."""
    half = angles[..., : angles.shape[-1] // 2]
    return (torch.cos(half) * scale).to(dtype), (torch.sin(half) * scale).to(dtype)


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[s, b, n, d] vectors rotated to their positions (Su et al. 2021, "RoFormer"): halves (a, b) of the last dimension
    become (a cos - b sin, b cos + a sin)."""
    a, b = vectors.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RotatingSelfAttention(SelfAttention):
    """A SelfAttention that rotates queries and keys as it makes them, before any cache."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """SelfAttention's forward pass, which rotates packed sequences by itself unless they share prompts."""
        self._angles, self._start, self._of_rows = None, 0, None
        self._positions = packed_seq_params.positions if isinstance(packed_seq_params, SharedPrompts) else None
        known = packed_seq_params is None or self._positions is not None
        if known and torch.is_tensor(rotary_pos_emb) and rotates(self.config):
            self._angles, rotary_pos_emb = rotary_pos_emb, None
            self._start = 0 if inference_context is None else inference_context.sequence_len_offset
        after_prompts = isinstance(inference_context, PromptCacheContext)
        if after_prompts:
            self.core_attention.prompts = inference_context.cached_prompts(self.layer_number)
            self._start += inference_context.prefix
            self._of_rows = inference_context.positions(hidden_states.shape[0])
        output = super().forward(
            hidden_states,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )
        if after_prompts:
            self.core_attention.prompts = None
        return output

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if self._angles is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        cos, sin = self._turns(query)
        return rotate(query, cos, sin), rotate(key, cos, sin), *rest

    def _allocate_memory(self, length: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A cache [length, rows, groups, width]. On a CPU of fp32 at least, where torch's attention reads it: a kernel
        for 16 bits would first make fp32 of all of it at each new token."""
        cache = super()._allocate_memory(length, rows, width, dtype)
        widens = cache.dtype.itemsize < 4 and not cache.is_cuda and isinstance(self.core_attention, SDPAttention)
        return cache.float() if widens else cache

    def _turns(self, vectors: Tensor) -> Turns:
        """The cosines and sines for vectors [s, ...] that follow the cached ones, or at a pack's positions."""
        packed = self._positions is not None
        if self._of_rows is not None:  # [rows, s] positions: [s, rows, 1, d] angles
            angles = self._angles[self._of_rows.T].squeeze(2)
            return turns(angles, self._yarn_concentration_factor, vectors.dtype)
        angles = self._angles if packed else self._angles[self._start : self._start + vectors.shape[0]]
        found = turns(angles, self._yarn_concentration_factor, vectors.dtype)
        return tuple(part[self._positions] for part in found) if packed else found


def rotates(config: TransformerConfig) -> bool:
    """Whether a model's rotary positions are those of ``rotate``, in every layer and for the whole of a head."""
    whole = getattr(config, "rotary_percent", 1.0) == 1.0 and not config.multi_latent_attention
    return whole and not config.rotary_interleaved and not config.no_rope_freq and not config.flash_decode
