"""Torch's norms, and, made of local parts, the layers of families that Bridge has with Transformer Engine's alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from nemo_edo.errors import UserError
from nemo_edo.megatron.cpu.attention import RotatingSelfAttention


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm whose weights are stored as their difference from 1, and added to it in fp32 (Gemma)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(hidden.dtype)


class ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """The same (Nemotron)."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = 1 + self.weight.float(), self.bias.float()
        return F.layer_norm(hidden.float(), self.normalized_shape, weight, bias, self.eps).to(hidden.dtype)


KINDS = {  # by normalization and layernorm_zero_centered_gamma
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("LayerNorm", True): ZeroCentredLayerNorm,
    ("RMSNorm", True): ZeroCentredRMSNorm,
}


class TorchNorm:
    """Makes a LayerNorm or an RMSNorm, as the config says; called as Megatron calls a layer spec's norm.

    Under sequence parallelism a rank norms its own tokens, so that it has a part of the weights' gradient: the mark on
    the weights has ``finalize_model_grads`` add the parts up. Megatron's own wrapper refuses sequence parallelism.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        norm = KINDS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


# --- families ------------------------------------------------------------------------------------------------------

PLAIN = (  # names of Bridge's functions whose layers have Megatron's local form as it is
    *("default_layer_spec", "get_gpt_decoder_block_spec", "_ernie45_decoder_block_spec"),
    *("_build_exaone_moe_layer_spec", "local_layer_spec"),
)

NORMS = (  # names of ``NormedSum``'s weights in Bridge's tables of weights, and in a model
    ("self_attention.linear_proj.post_layernorm.weight", "self_attn_bda.post_layernorm.weight"),
    ("mlp.linear_fc2.post_layernorm.weight", "mlp_bda.post_layernorm.weight"),
)


class NormedSum(torch.nn.Module):
    """Norms what attention or MLP return before it is added to the residual stream; in the place of Megatron's
    bias_dropout_add, so that adapters of the linear layer before it are inside the norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.post_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        return lambda output, residual, dropout: residual + self.post_layernorm(output[0])


class CappedAttention(DotProductAttention):
    """Scores s become c tanh(s / c) before the softmax (Gemma 2)."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        softmax, cap = self.scale_mask_softmax, config.attn_logit_softcapping
        del self.scale_mask_softmax  # a module's name takes no function
        self.scale_mask_softmax = lambda scores, *rest: softmax(cap * torch.tanh(scores / cap), *rest)


def local_changes(provider: Any) -> Callable[[ModuleSpec], None]:
    """Sets the fields of a family's config that local layers need, and returns what changes a local layer into the
    family's. Raises UserError for a family whose layers need Transformer Engine.

    Families are told apart by the name of Bridge's function that makes their layers."""
    spec = provider.transformer_layer_spec
    name = getattr(getattr(spec, "func", spec), "__name__", type(spec).__name__)
    attention = None
    if name == "gemma2_layer_spec":
        provider.softmax_scale, provider.window_attn_skip_freq = provider.query_pre_attn_scalar**-0.5, 2
    elif name == "gemma3_layer_spec":
        from megatron.bridge.models.gemma.gemma3_provider import Gemma3SelfAttention

        provider.window_size = (provider.window_size - 1, 0)
        provider.window_attn_skip_freq = sum(provider.interleaved_attn_pattern)
        attention = type("RotatingGemma3SelfAttention", (Gemma3SelfAttention, RotatingSelfAttention), {})
    elif name == "olmoe_layer_spec":
        from megatron.bridge.models.olmoe.olmoe_provider import OLMoESelfAttention

        attention = type("RotatingOLMoESelfAttention", (RotatingSelfAttention, OLMoESelfAttention), {})
    elif name not in (*PLAIN, "exaone4_layer_spec"):
        raise UserError(
            f"Megatron-Bridge's layers of this model ({name}) need Transformer Engine and a GPU "
            f"({type(provider).__name__}); docs/models.md lists the families that train without"
        )

    def change(layer: ModuleSpec) -> None:
        parts = layer.submodules
        if name in ("gemma2_layer_spec", "gemma3_layer_spec", "exaone4_layer_spec"):
            parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=NormedSum, params={"config": provider})
        if name == "exaone4_layer_spec":
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        if name == "gemma2_layer_spec":
            parts.self_attention.submodules.core_attention = CappedAttention
        if attention is not None:
            parts.self_attention.module = attention

    return change


def complete_tables() -> None:
    """Adds to the tables in which Bridge looks up a model's weights the names that local layers have: norms after
    attention and MLP, and experts one by one. Bridge's own are Transformer Engine's."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry as Registry

    if NORMS[0] in Registry._SEPARATE_LAYERNORM_REWRITES:
        return
    Registry._SEPARATE_LAYERNORM_REWRITES.extend(NORMS)
    add_norms = Registry._add_separate_layernorm_mappings

    def add_names(self: Any) -> None:
        add_norms(self)
        known = {mapping.megatron_param for mapping in self.mappings}
        for mapping in list(self.mappings):
            before, grouped, layer = mapping.megatron_param.partition(".mlp.experts.linear_")
            one = f"{before}.mlp.experts.local_experts.*.linear_{layer.removesuffix('*')}"
            if grouped and layer.endswith(".weight*") and one not in known:
                names = mapping.hf_param
                self.mappings.append(
                    type(mapping)(one, **names) if isinstance(names, dict) else type(mapping)(one, names)
                )

    Registry._add_separate_layernorm_mappings = add_names
