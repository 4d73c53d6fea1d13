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
    """Of ``FUSED``, the version of each that can be imported, or why it is absent. Megatron needs apex's fused weight
    gradients for its own layers only: Transformer Engine's have theirs."""
    return {name: _available(name) or f"absent: {_why_absent(name)}" for name in FUSED}


def _fused(weight_gradients: bool, linear: str, core: str) -> dict[str, str]:
    """Of ``FUSED``, whether a model with these layers uses it, and why not."""
    of_te = {"linear": "transformer_engine" in linear, "core": "transformer_engine" in core}
    use = dict.fromkeys(FUSED, "")
    if any(of_te.values()):
        use["Transformer Engine"] = (
            f"{_available('Transformer Engine')}, in {' and '.join(k for k in of_te if of_te[k])}"
        )
    if weight_gradients:
        use["fused weight gradients"] = "transformer engine's" if of_te["linear"] else "apex's"
    if of_te["core"] and os.environ.get("NVTE_FLASH_ATTN", "1") != "0" and _available("flash attention"):
        use["flash attention"] = f"{_available('flash attention')}, where Transformer Engine chooses it"
    return {name: found or f"not used: {_why_absent(name)}" for name, found in use.items()}


def _available(name: str) -> str | None:
    """Its version, where it can be imported."""
    module, package = FUSED[name]
    try:
        importlib.import_module(module)
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
    except (ImportError, OSError):  # OSError: a library that its compiled part needs
        return None


def _why_absent(name: str) -> str:
    if not torch.cuda.is_available():
        return "the device is a CPU"
    try:
        importlib.import_module(FUSED[name][0])
    except (ImportError, OSError) as error:
        return str(error)
    return "the model has other layers, or the environment turns it off"


def _name(module: object) -> str:
    return _qualified(type(module))


def _qualified(thing: type) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
