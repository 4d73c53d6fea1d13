"""Which implementations a model and its optimizer run on: Transformer Engine's, apex's, torch's or Megatron's own.

Megatron chooses by what is installed. A run that is slower than it should be often lacks one of them, hence the list.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version

import torch
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
        "fp32 products": "TF32" if torch.backends.cuda.matmul.allow_tf32 else "fp32",
        "rotary embedding": "fused" if config.apply_rope_fusion else "torch",
        "optimizer": _qualified(optimizer.Adam),
        "gradient norm": _qualified(clip_grads.l2_norm_impl),
        **_fused(config.gradient_accumulation_fusion, _name(attention.linear_proj), _name(attention.core_attention)),
    }


FUSED = {
    "Transformer Engine": ("transformer_engine.pytorch", "transformer-engine"),
    "fused weight gradients": ("fused_weight_gradient_mlp_cuda", "apex"),
    "flash attention": ("flash_attn", "flash-attn"),
}
"""Module and package of what Megatron computes with on GPUs where it is installed, and does without otherwise."""


def fused_kernels() -> dict[str, str]:
    """The version of each of ``FUSED``, or why it is absent."""
    return {name: _state(*names) for name, names in FUSED.items()}


def _state(module: str, package: str) -> str:
    if not torch.cuda.is_available():
        return "absent: the device is a CPU"
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library that its compiled part needs
        return f"absent: {error}"
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _fused(weight_gradients: bool, linear: str, core: str) -> dict[str, str]:
    """The same of a model with these layers, which may not use what is there."""
    te_linear, te_core = "transformer_engine" in linear, "transformer_engine" in core
    used = {
        "Transformer Engine": te_linear or te_core,
        "fused weight gradients": weight_gradients,
        "flash attention": te_core and os.environ.get("NVTE_FLASH_ATTN") != "0",
    }
    found = fused_kernels()
    if weight_gradients and te_linear:  # apex's are for Megatron's own layers
        found["fused weight gradients"] = "Transformer Engine's own"
    return {
        name: state if used[name] or state.startswith("absent") else f"not used by this model's layers ({state})"
        for name, state in found.items()
    }


def _name(module: object) -> str:
    return _qualified(type(module))


def _qualified(thing: type) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
