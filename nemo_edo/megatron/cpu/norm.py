"""The norms of layers where Transformer Engine is absent: torch's, also under sequence parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """Its weights are stored as their difference from 1, and added to it in fp32 (Gemma)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(hidden.dtype)


class ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """The same (Nemotron)."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = 1 + self.weight.float(), self.bias.float()
        return F.layer_norm(hidden.float(), self.normalized_shape, weight, bias, self.eps).to(hidden.dtype)


NORMS = {
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("LayerNorm", True): ZeroCentredLayerNorm,
    ("RMSNorm", True): ZeroCentredRMSNorm,
}
"""By normalization and layernorm_zero_centered_gamma."""


class TorchNorm:
    """Makes a LayerNorm or an RMSNorm, as the config says; called as Megatron calls a layer spec's norm.

    Under sequence parallelism a rank norms its own tokens, so that it has a part of the weights' gradient: the mark on
    the weights has ``finalize_model_grads`` add the parts up. Megatron's own wrapper refuses sequence parallelism.
    Raises ValueError for a norm that is neither.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        kind = config.normalization, config.layernorm_zero_centered_gamma
        if kind not in NORMS:
            raise ValueError(f"normalization is {config.normalization!r}, expected LayerNorm or RMSNorm")
        norm = NORMS[kind](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
