"""Megatron's self-attention for layers without Transformer Engine, with its rotary positions made cheap.

Megatron's own rotates every cached key again at each new token, and rotates with five temporary tensors. Here a cache
holds keys as they are used, a rotation writes its result once, and so does the backward pass of the cut into queries,
keys and values, which otherwise puts three gradients together by a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from nemo_edo.megatron.cpu.attention import SDPAttention
from nemo_edo.megatron.cpu.prompt_cache import PromptCacheContext
from nemo_edo.megatron.shared_prompts import SharedPrompts

Turns = tuple[Tensor, Tensor]
"""Cosines and sines [s, 1, 1, d / 2] of the angles of positions."""


class _Rotate(torch.autograd.Function):
    """Halves (a, b) of the last dimension become (a cos - b sin, b cos + a sin)."""

    @staticmethod
    def forward(ctx, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_into(_empty(vectors), vectors, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_into(_empty(gradient), gradient, cos, -sin), None, None


class _CutAndRotate(torch.autograd.Function):
    """[s, b, g, (n + 2) d], each group's queries, key and value, become queries [s, b, g n, d], keys and values
    [s, b, g, d], of which the former two are rotated."""

    @staticmethod
    def forward(ctx, mixed: Tensor, width: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        query, key, value = _cut(mixed, width)
        rotated = [_rotate_into(_empty(part), part, *_for_groups(cos, sin)) for part in (query, key)]
        return tuple(part.flatten(2, 3) for part in (*rotated, value))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        groups, width = gradients[1].shape[2:]
        queries, key, value = (gradient.unflatten(2, (groups, -1)) for gradient in gradients)
        mixed = key.new_empty(*key.shape[:3], (queries.shape[3] + 2) * width)
        of_query, of_key, of_value = _cut(mixed, width)
        for part, gradient in ((of_query, queries), (of_key, key)):
            _rotate_into(part, gradient, *_for_groups(cos, -sin))
        of_value.copy_(value)
        return mixed, None, None, None


def _cut(mixed: Tensor, width: int) -> tuple[Tensor, ...]:
    """Views [s, b, g, n, d] of [s, b, g, (n + 2) d]; of keys and values n is 1."""
    heads = mixed.unflatten(-1, (-1, width))
    return heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]


def _for_groups(cos: Tensor, sin: Tensor) -> Turns:
    return cos.unsqueeze(2), sin.unsqueeze(2)


def _empty(vectors: Tensor) -> Tensor:
    """Like them, without their gaps: they may be parts of a larger tensor."""
    return torch.empty(vectors.shape, dtype=vectors.dtype, device=vectors.device)


def _rotate_into(out: Tensor, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if vectors.ndim > 3 and vectors.shape[1] == 1 < vectors.shape[0] and not vectors.is_cuda:
        # Of a single row torch would visit each position's few heads before the next position, which takes it several
        # times as long. Those of several rows it sees as one dimension.
        for part, heads in zip(out.unbind(2), vectors.unbind(2), strict=True):
            _rotate_into(part, heads, cos.select(2, 0), sin.select(2, 0))
        return out
    (a, b), (first, second) = vectors.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return out


def turns(angles: Tensor, scale: float, dtype: torch.dtype) -> Turns:
    """Of angles [s, 1, 1, d], twice the same d / 2 of them, as Megatron's RotaryEmbedding gives them. scale: of what
    they rotate (YaRN's concentration)."""
    half = angles[..., : angles.shape[-1] // 2]
    return (torch.cos(half) * scale).to(dtype), (torch.sin(half) * scale).to(dtype)


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[s, b, n, d] vectors rotated to their positions (Su et al. 2021, "RoFormer"), paired by halves."""
    return _Rotate.apply(vectors, cos, sin)


def cut_and_rotate(mixed: Tensor, width: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries [s, b, g n, d], keys and values [s, b, g, d] of [s, b, g, (n + 2) d], d the width; the former two rotated
    as by ``rotate``."""
    return _CutAndRotate.apply(mixed, width, cos, sin)


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
        """SelfAttention's forward pass. It handles packed sequences, whose positions restart in the middle of a row,
        except those that share prompts, which it does not support."""
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
        if self._holds_whole_groups:
            mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
            return cut_and_rotate(mixed, self.hidden_size_per_attention_head, *self._turns(mixed))
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        cos, sin = self._turns(query)
        return rotate(query, cos, sin), rotate(key, cos, sin), *rest

    def _allocate_memory(self, length: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A cache [length, rows, groups, width]. On a CPU of fp32 at least, where torch's attention reads it: a kernel
        for 16 bits would first make fp32 of all of it at each new token."""
        cache = super()._allocate_memory(length, rows, width, dtype)
        widens = cache.dtype.itemsize < 4 and not cache.is_cuda and isinstance(self.core_attention, SDPAttention)
        return cache.float() if widens else cache

    @property
    def _holds_whole_groups(self) -> bool:
        """Whether queries, keys and values are slices of the product, with no operation in between."""
        config, norms = self.config, (self.q_layernorm, self.k_layernorm)
        untouched = all(norm is None or isinstance(norm, IdentityOp) for norm in norms)
        plain = untouched and not config.attention_output_gate and not config.test_mode
        return plain and config.num_query_groups >= self.world_size

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
