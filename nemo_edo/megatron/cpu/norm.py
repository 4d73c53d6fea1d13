"""The norms of layers where Transformer Engine is absent: torch's, also under sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class TorchNorm:
    """Makes a LayerNorm or an RMSNorm, as the config says; called as Megatron calls a layer spec's norm.

    Under sequence parallelism a rank norms its own tokens, so that it has a part of the weights' gradient: the mark on
    the weights has ``finalize_model_grads`` add the parts up. Megatron's own wrapper refuses sequence parallelism.
    Raises ValueError for a norm that is neither, and for weights stored as their difference from 1.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        if config.normalization not in NORMS:
            raise ValueError(f"normalization is {config.normalization!r}, expected one of {', '.join(NORMS)}")
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma needs Transformer Engine's norm")
        norm = NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
