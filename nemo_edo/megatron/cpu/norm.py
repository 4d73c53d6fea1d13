"""The norms of layers where Transformer Engine is absent: torch's LayerNorm, and an RMSNorm, also under sequence
parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """With r = (mean(x^2) + eps)^(-1/2): y = x r w, and for an upstream gradient g,

    dx = r (g w - x r mean(g w x r)), dw = sum of g x r over the vectors; in fp32 where the type of x is a shorter one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        gradient, wide_weight = _wide(gradient), _wide(weight)
        normed = _wide(x) * scale
        of_weight = gradient * normed
        along = (of_weight @ wide_weight).unsqueeze(-1).div_(x.shape[-1])
        of_x = (gradient * wide_weight).addcmul_(normed, along, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype), None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class RMSNorm(torch.nn.RMSNorm):
    """torch's (Zhang and Sennrich 2019), whose backward pass on a CPU goes through some ten temporary tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": RMSNorm}


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
