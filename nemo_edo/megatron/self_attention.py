"""Megatron's self-attention for layers without Transformer Engine, with its rotary positions made cheap.

Megatron's own rotates every cached key again at each new token, and rotates with five temporary tensors. Here a cache
holds keys as they are used, and a rotation writes its result once.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class _Rotate(torch.autograd.Function):
    """Halves (a, b) of the last dimension become (a cos - b sin, b cos + a sin)."""

    @staticmethod
    def forward(ctx, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(vectors, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(vectors.shape, dtype=vectors.dtype, device=vectors.device)
    (a, b), (first, second) = vectors.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return out


def rotate(vectors: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """[s, b, n, d] vectors rotated to their positions (Su et al. 2021, "RoFormer"), halves and not neighbours paired.

    angles: [s, 1, 1, d], twice the same d / 2 of them, as Megatron's RotaryEmbedding gives them. scale: of the result
    (YaRN's concentration).
    """
    half = angles[..., : angles.shape[-1] // 2]
    return _Rotate.apply(vectors, *((f(half) * scale).to(vectors.dtype) for f in (torch.cos, torch.sin)))


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
        """As SelfAttention's. Packed sequences are left to it: their positions begin anew in the middle of a row."""
        self._angles, self._start = None, 0
        if packed_seq_params is None and torch.is_tensor(rotary_pos_emb) and rotates(self.config):
            self._angles, rotary_pos_emb = rotary_pos_emb, None
            self._start = 0 if inference_context is None else inference_context.sequence_len_offset
        return super().forward(
            hidden_states,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._angles is not None:
            angles = self._angles[self._start : self._start + query.shape[0]]
            scale = _yarn_get_concentration_factor_from_config(self.config)
            query, key = rotate(query, angles, scale), rotate(key, angles, scale)
        return query, key, *rest


def rotates(config: TransformerConfig) -> bool:
    """Whether a model's rotary positions are those of ``rotate``, in every layer and for the whole of a head."""
    whole = getattr(config, "rotary_percent", 1.0) == 1.0 and not config.multi_latent_attention
    return whole and not config.rotary_interleaved and not config.no_rope_freq and not config.flash_decode
