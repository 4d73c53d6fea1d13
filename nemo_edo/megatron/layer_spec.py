"""The modules that a transformer layer is made of where Transformer Engine is absent."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec


def local_layer_spec(provider) -> ModuleSpec:
    """Megatron's local layer, for the model that ``provider`` (Megatron-Bridge's) describes."""
    return get_gpt_layer_local_spec(normalization=provider.normalization, qk_layernorm=provider.qk_layernorm)
