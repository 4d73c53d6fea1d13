"""Attention by torch's scaled_dot_product_attention, in place of Megatron's own DotProductAttention.

It never stores the scores of a whole sequence, reads grouped keys and values without a copy for each head, and takes
packed sequences, which Megatron's own does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_edo.megatron.cpu.prompt_cache import CachedPrompts
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
        # apply_query_key_layer_scaling divides the scores by the layer's number and multiplies them again, for fp16's
        # range alone: here scores are in fp32.
        self.softmax_scale = softmax_scale
        self.prompts: CachedPrompts | None = None
        """The prompts that precede a cache, for the next ``forward``; None: there are none."""

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
            return self._shared(query, key, value, packed_seq_params)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        queries = query.shape[0]
        if queries == 1 and (self.prompts is not None or not query.is_cuda):
            return self._single(query, key, value)
        context = self._attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)), causal=queries > 1)
        return context.permute(2, 0, 1, 3).reshape(queries, query.shape[1], -1)

    def _single(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention as matrix products: for a single query the CPU kernel takes up to twice as long, and no kernel
        supports prompts that rows share."""
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

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, pack: SharedPrompts) -> Tensor:
        blocks = zip(*(pack.spread(part) for part in (query, key, value)), strict=True)
        contexts = [self._attend(*(part.transpose(1, 2) for part in block), causal=True) for block in blocks]
        return pack.gather([context.transpose(1, 2) for context in contexts]).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """[b, n, s, d] from [b, n, s, d] and twice [b, g, k, d]."""
        grouped, dtype = key.shape[1] != query.shape[1], query.dtype
        query = query.to(key.dtype)  # a cache may be more precise
        if query.requires_grad and dtype.itemsize < 4 and not query.is_cuda:
            # The backward pass of torch's kernel for CPUs takes four times as long in bf16 as in fp32.
            query, key, value = query.float(), key.float(), value.float()
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=self.softmax_scale, enable_gqa=grouped
        )
        return context.to(dtype)
