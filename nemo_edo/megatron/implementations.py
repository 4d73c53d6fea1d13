"""Which implementations a model and its optimizer run on: Transformer Engine's, apex's, torch's or Megatron's own.

Megatron chooses by what is installed. A run that is slower than it should be often lacks one of them, hence the list.
"""

from __future__ import annotations

from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


def kernels(chunks: list[MegatronModule]) -> dict[str, str]:
    """For each part of the computation, what this process computes it with."""
    model = unwrap_model(chunks[0])
    config, attention = model.config, model.decoder.layers[0].self_attention
    norm = model.decoder.layers[0].input_layernorm
    if isinstance(norm, IdentityOp):  # Transformer Engine's is part of the matrix product that follows
        norm = attention.linear_qkv
    softmax = "in the attention"
    if isinstance(attention.core_attention, DotProductAttention):
        softmax = "megatron, fused" if config.masked_softmax_fusion else "torch"
    return {
        "attention": _name(attention.core_attention),
        "softmax": softmax,
        "norm": _name(norm),
        "matrix products": _name(attention.linear_proj) + (f", fp8 {config.fp8_recipe}" if config.fp8 else ""),
        "rotary embedding": "fused" if config.apply_rope_fusion else "torch",
        "optimizer": _qualified(optimizer.Adam),
        "gradient norm": _qualified(clip_grads.l2_norm_impl),
    }


def _name(module: object) -> str:
    return _qualified(type(module))


def _qualified(thing: type) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
