"""Attention for layers without Transformer Engine, in place of Megatron's own.

``SDPAttention`` is torch's scaled_dot_product_attention: it never stores the scores of a whole sequence, reads grouped
keys and values without a copy for each head, and takes packed sequences. ``RotatingSelfAttention`` rotates keys before
they are cached, where Megatron's own rotates every cached key again at each new token, and knows no positions that
restart in a row. So prompts are stored once, and a pack may share its prompts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from nemo_edo.megatron.decoding_cache import CachedPrompts, PromptCacheContext
from nemo_edo.megatron.packing import PackedSequences
from nemo_edo.megatron.shared_prompts import SharedPrompts


def sdpa_lacks(config: TransformerConfig) -> str | None:
    """What a model needs from its attention that ``SDPAttention`` lacks, in words; None: nothing."""
    needs = {
        "sliding-window attention": config.window_size is not None,
        "attention sinks (a softmax offset)": config.softmax_type != "vanilla",
        "dropout of attention": config.attention_dropout > 0,
        "context parallelism": config.context_parallel_size > 1,
        "attention in FP8": config.fp8_dot_product_attention or config.fp8_multi_head_attention,
        "the largest attention score (qk_clip)": config.qk_clip or config.log_max_attention_logit,
    }
    return next((need for need, needed in needs.items() if needed), None)


class SDPAttention(MegatronModule):
    """Causal self-attention, with the constructor and ``forward`` of megatron-core's DotProductAttention, for models
    that need nothing that it lacks (``sdpa_lacks``). Raises ValueError for attention that is not causal."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        """k_channels, v_channels: sizes of multi-latent attention's heads, which the tensors have anyway."""
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"{attention_type}-attention, {attn_mask_type.name}: expected causal self-attention")
        # apply_query_key_layer_scaling, which scales scores and undoes it, is for fp16's range: here they are in fp32.
        self.softmax_scale = softmax_scale
        self.prompts: CachedPrompts | None = None  # those that precede a cache, for the next ``forward``

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | SharedPrompts | None = None,
    ) -> Tensor:
        """[s, b, n * d] from queries [s, b, n, d] and keys and values [k, b, g, d], where g divides n, and k is above s
        only for a single query that follows a cache. Packed: [t, n * d] from [t, n, d] and [t, g, d], each sequence by
        itself, preceded by the prompts that they share. There is no mask: attention is causal by itself."""
        if isinstance(packed_seq_params, SharedPrompts):
            blocks = zip(*(packed_seq_params.spread(part) for part in (query, key, value)), strict=True)
            contexts = [self._attend(*(part.transpose(1, 2) for part in block), causal=True) for block in blocks]
            return packed_seq_params.gather([context.transpose(1, 2) for context in contexts]).flatten(1)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        queries = query.shape[0]
        if queries == 1 and (self.prompts is not None or not query.is_cuda):
            return self._single(query, key, value)
        context = self._attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)), causal=queries > 1)
        return context.permute(2, 0, 1, 3).reshape(queries, query.shape[1], -1)

    def _single(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Matrix products: the CPU's kernel takes up to twice as long for one query, and none has shared prompts."""
        rows, groups, width = key.shape[1:]
        scale = width**-0.5 if self.softmax_scale is None else self.softmax_scale
        queries = (query * scale).to(key.dtype).view(rows, groups, -1, width)
        keys, values = (part.permute(1, 2, 0, 3).flatten(0, 1) for part in (key, value))
        scores = torch.bmm(queries.flatten(0, 1), keys.transpose(1, 2))
        if self.prompts is None:
            context = torch.bmm(scores.softmax(-1), values)
        else:
            of_prompts = self.prompts.scores(queries)
            own = self.prompts.of_own(scores.view(rows, groups, -1, len(key)))
            weights = torch.cat([of_prompts, own], dim=-1).softmax(-1)
            of_prompts, own = weights.split([of_prompts.shape[-1], len(key)], dim=-1)
            context = torch.bmm(own.flatten(0, 1), values).view_as(queries) + self.prompts.context(of_prompts)
        return context.reshape(1, rows, -1).to(query.dtype)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """One call for each sequence: a mask over the whole pack would cost the square of its length."""
        parts = (part.transpose(0, 1).split(packed.lengths, dim=1) for part in (query, key, value))
        sequences = zip(*parts, strict=True)
        contexts = [self._attend(*(part[None] for part in sequence), causal=True)[0] for sequence in sequences]
        return torch.cat(contexts, dim=1).transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """[b, n, s, d] from [b, n, s, d] and twice [b, g, k, d]."""
        grouped, dtype = key.shape[1] != query.shape[1], query.dtype
        query = query.to(key.dtype)  # a cache may be more precise
        if query.dtype.itemsize < 4 and not query.is_cuda:
            # The backward pass of torch's kernel for CPUs takes four times as long in bf16 as in fp32, and the forward
            # pass as long. Without gradients too: log-probabilities of a pass are those of the training pass.
            query, key, value = query.float(), key.float(), value.float()
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=self.softmax_scale, enable_gqa=grouped
        )
        return context.to(dtype)


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[s, b, n, d] vectors rotated to their positions (Su et al. 2021, "RoFormer"): halves (a, b) of the last dimension
    become (a cos - b sin, b cos + a sin)."""
    a, b = vectors.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LatentSelfAttention(MLASelfAttention):
    """Megatron's, whose tensor-parallel ranks share keys with positions: each rank's heads add to their gradient, and
    Megatron's takes one rank's alone where the layer that makes them is split."""

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        queries, latent = super()._qkv_down_projection(hidden_states)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        if latent.size(-1) == sum(widths):
            return queries, latent
        latent = gather_from_tensor_model_parallel_region(latent)
        if self.config.sequence_parallel:  # the caller gathers the sequence again, which adds up gradients
            return queries, scatter_to_sequence_parallel_region(latent)
        compressed, with_positions = latent.split(widths, dim=-1)
        return queries, torch.cat([compressed, copy_to_tensor_model_parallel_region(with_positions)], dim=-1)


class RotatingSelfAttention(SelfAttention):
    """A SelfAttention that rotates queries and keys as it makes them, before any cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """SelfAttention's forward pass, which rotates packed sequences by itself unless they share prompts."""
        angles, context, pack = map(options.get, ("rotary_pos_emb", "inference_context", "packed_seq_params"))
        self._angles, self._start, self._of_rows = None, 0, None
        self._positions = pack.positions if isinstance(pack, SharedPrompts) else None
        known = pack is None or self._positions is not None
        if known and torch.is_tensor(angles) and rotates(self.config):
            self._angles, options["rotary_pos_emb"] = angles, None
            self._start = 0 if context is None else context.sequence_len_offset
        after_prompts = isinstance(context, PromptCacheContext)
        if after_prompts:
            self.core_attention.prompts = context.cached_prompts(self.layer_number)
            self._start += context.prefix
            self._of_rows = context.positions(hidden_states.shape[0])
        output = super().forward(hidden_states, *args, **options)
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

    def _turns(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [s, 1 or rows, 1, d / 2] for vectors [s, ...] that follow the cached ones, or at a pack's
        positions. Megatron's RotaryEmbedding gives the same d / 2 angles twice."""
        if self._of_rows is not None:  # [rows, s] positions: [s, rows, 1, d] angles
            angles = self._angles[self._of_rows.T].squeeze(2)
        elif self._positions is not None:
            angles = self._angles
        else:
            angles = self._angles[self._start : self._start + vectors.shape[0]]
        half, scale = angles[..., : angles.shape[-1] // 2], self._yarn_concentration_factor
        cos, sin = (torch.cos(half) * scale).to(vectors.dtype), (torch.sin(half) * scale).to(vectors.dtype)
        return (cos, sin) if self._positions is None else (cos[self._positions], sin[self._positions])


def rotates(config: TransformerConfig) -> bool:
    """Whether a model's rotary positions are those of ``rotate``, in every layer and for the whole of a head."""
    whole = getattr(config, "rotary_percent", 1.0) == 1.0 and not config.multi_latent_attention
    return whole and not config.rotary_interleaved and not config.no_rope_freq and not config.flash_decode
