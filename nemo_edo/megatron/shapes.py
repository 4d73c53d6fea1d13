"""What a layout requires of the shapes of micro-batches, and how a sequence is shared by context-parallel ranks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nemo_edo.data.shares import InputShapes
from nemo_edo.megatron.precision import token_multiple


def input_shapes(config: TransformerConfig) -> InputShapes:
    """What the layout and the precision of Megatron's config of a model ask for."""
    context = config.context_parallel_size
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    step = token_multiple(config.fp8_recipe, gathers=shares > 1) if config.fp8 else 1
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    return InputShapes(
        multiple=math.lcm(2 * context if context > 1 else 1, context * shares * step),
        # With two stages, a stage's previous and next neighbours are one process, which receives the shapes of
        # activations and of gradients in another order than they are sent in: they have to be the same.
        uniform=interleaved,
        group=config.pipeline_model_parallel_size if interleaved else 1,
    )


def pad_to(tokens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Token ids [b, s], or values [b, s, ...], padded with zeros to [rows, length, ...]. Causal attention never looks
    at them."""
    rows, length = shape
    behind = (0, 0) * (tokens.ndim - 2)
    return F.pad(tokens, (*behind, 0, length - tokens.shape[1], 0, rows - tokens.shape[0]))


def context_share(tensor: Tensor) -> Tensor:
    """This context-parallel rank's positions of a tensor [b, s]: chunks r and 2 C - 1 - r of 2 C, whose causal
    attention costs every rank the same."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return tensor
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def gather_context(tensor: Tensor) -> Tensor:
    """[b, s] from every context-parallel rank's share [b, s / C], the inverse of ``context_share``.

    Every rank then computes the same loss from it. A rank's gradient is that of its own share, once: Megatron adds up
    what the ranks have of the weights' gradients.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return tensor
    return _GatherContext.apply(tensor)


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        shares = [torch.empty_like(share) for _ in range(group.size())]
        torch.distributed.all_gather(shares, share.contiguous(), group=group)
        halves = [part.chunk(2, dim=1) for part in shares]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return context_share(gradient)
