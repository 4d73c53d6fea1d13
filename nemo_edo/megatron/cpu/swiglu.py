"""Megatron's MLP for layers without Transformer Engine, with its gated activation computed a block of rows at a time.

Megatron's own makes a tensor for the activation, one for the product and, in the backward pass, four more of the size
of a half and a copy that joins two of them. Here a block's numbers stay in the cache, and each result is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor

BLOCK_BYTES = 1 << 20
"""Bytes of the input that a CPU processes at a time: about as many as fit in a core's cache. A GPU takes all at once,
as each block is several launches."""


class _SwiGLU(torch.autograd.Function):
    """(a, b) of the last dimension become silu(a) b (Shazeer 2020, "GLU Variants Improve Transformer")."""

    @staticmethod
    def forward(ctx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        for (a, b), result in _blocks(both, out):
            torch.ops.aten.silu.out(a, out=result)
            result.mul_(b)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        for (a, b), part, (of_a, of_b) in _blocks(both, gradient, out):
            torch.ops.aten.silu.out(a, out=of_b)
            of_b.mul_(part)
            torch.mul(part, b, out=of_a)
            torch.ops.aten.silu_backward.grad_input(of_a, a, grad_input=of_a)
        return out


def _blocks(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """The tensors' rows, so many at a time; those as wide as the first are cut into halves."""
    width, on_cpu = tensors[0].shape[-1], tensors[0].device.type == "cpu"
    rows = max(1, BLOCK_BYTES // (width * tensors[0].element_size()) if on_cpu else tensors[0].shape[:-1].numel())
    for parts in zip(*(t.reshape(-1, t.shape[-1]).split(rows) for t in tensors), strict=True):
        yield tuple(part.chunk(2, dim=-1) if part.shape[-1] == width else part for part in parts)


def swiglu(both: Tensor) -> Tensor:
    """[..., f] from [..., 2 f]: silu of the first half times the second."""
    return _SwiGLU.apply(both.contiguous())


class SwiGLUMLP(MLP):
    """An MLP whose activation is ``swiglu``."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any):
        """MLP's forward pass, which also handles experts' weights on tokens."""
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(both))


def is_swiglu(config: TransformerConfig) -> bool:
    """Whether an MLP of this model has the activation of ``SwiGLUMLP``, and nothing else."""
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0
    without_bias = not config.add_bias_linear and not config.bias_activation_fusion
    gated = config.gated_linear_unit and config.activation_func is F.silu
    return gated and plain and without_bias and not config.use_te_activation_func
