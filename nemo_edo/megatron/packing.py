"""What the model sees of a micro-batch: one row per sequence, or all sequences packed into one row; which shapes a
layout asks for, and how a sequence is shared by context-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nemo_edo.data.shares import InputShapes
from nemo_edo.megatron.platform import moved
from nemo_edo.megatron.precision import token_multiple
from nemo_edo.types import TrainingBatch

R = TypeVar("R")


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, and what is read of it on the host: reading it from the GPU would wait for it
    in each layer."""

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence."""


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch's next-token positions [b, T] as the model's input [r, s]."""

    micro: TrainingBatch
    tokens: Tensor
    """[r, s] ids that enter the model."""
    targets: Tensor
    """[r, s] the ids that follow them."""
    positions: Tensor
    """[r, s] each one's place in its own sequence."""
    read: Tensor
    """[n] indices into this context-parallel rank's share of the r * s positions: those that a loss reads."""
    is_padding: bool
    """Whether no token of the micro-batch counts; known before the device computes."""
    packed: PackedSeqParams | None = None
    """Where the sequences of a pack begin and end; None: a row is a sequence."""
    kept: Tensor | None = None
    """[b, T], True at the positions that are in the pack, row by row."""
    places: Tensor | None = None
    """[b, T] indices into the pack, where several rows share tokens; None: in their order."""
    experts: Tensor | None = None
    """[r, s, layers * k] what the routers replay (``TrainingBatch.routed_experts``); None: they choose."""

    def to(self, device: torch.device) -> ModelInputs:
        micro, packed = (None if part is None else _moved(part, device) for part in (self.micro, self.packed))
        return replace(_moved(self, device), micro=micro, packed=packed)

    def to_rows(self, values: Tensor) -> Tensor:
        """[b, T] from the values at the positions that this rank's model saw, [r, s]; 0 outside the pack."""
        if self.kept is None:
            rows, length = self.micro.mask.shape
            return gather_context(values)[:rows, :length]
        if self.places is not None:
            return values[0].index_select(0, self.places.flatten()).view_as(self.places).where(self.kept, 0)
        return values.new_zeros(self.kept.shape).masked_scatter(self.kept, values[0])


def row_inputs(micro: TrainingBatch, shape: tuple[int, int]) -> ModelInputs:
    """A row for each sequence, padded to ``shape``. It needs no attention mask: causal attention never looks ahead into
    the padding."""
    inputs, targets = pad_to(micro.tokens[:, :-1], shape), pad_to(micro.tokens[:, 1:], shape)
    positions = torch.arange(shape[1], device=inputs.device).expand_as(inputs)
    read, experts = read_places(pad_to(micro.mask, shape)), micro.routed_experts
    experts = None if experts is None else pad_to(experts, shape)
    return ModelInputs(micro, inputs, targets, positions, read, is_padding(micro), experts=experts)


def packed_inputs(micro: TrainingBatch, lengths: Sequence[int], shape: tuple[int, int]) -> ModelInputs:
    """One row of the sequences' first ``lengths`` - 1 tokens. Where ``shape`` is longer the last sequence is padded, as
    a row would be. Attention and rotary embeddings know the sequences by Megatron's PackedSeqParams.
    """
    device = micro.tokens.device
    counts = torch.tensor(lengths, device=device) - 1
    kept = torch.arange(micro.mask.shape[1], device=device) < counts[:, None]
    inputs, targets = (pad_to(tokens[kept][None], shape) for tokens in (micro.tokens[:, :-1], micro.tokens[:, 1:]))
    counts[-1] += shape[1] - counts.sum()
    own = [length - 1 for length in lengths]
    own[-1] += shape[1] - sum(own)
    ends = counts.cumsum(0)
    starts = torch.repeat_interleave(ends - counts, counts)
    boundaries = F.pad(ends, (1, 0)).to(torch.int32)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(own),
        max_seqlen_kv=max(own),
        lengths=tuple(own),
    )
    positions = (torch.arange(shape[1], device=device) - starts)[None]
    read = read_places(pad_to(micro.mask[kept][None], shape))
    experts = None if micro.routed_experts is None else pad_to(micro.routed_experts[kept][None], shape)
    return ModelInputs(micro, inputs, targets, positions, read, is_padding(micro), packed, kept, experts=experts)


def read_places(mask: Tensor) -> Tensor:
    """``ModelInputs.read`` of the loss's mask at the model's positions, [r, s]."""
    return context_share(mask).flatten().nonzero().squeeze(-1)


def is_padding(micro: TrainingBatch) -> bool:
    """``ModelInputs.is_padding``."""
    return not bool(micro.mask.any())


def _moved(record: R, device: torch.device) -> R:
    """A dataclass with its tensors on the device."""
    tensors = {f.name: value for f in fields(record) if isinstance(value := getattr(record, f.name), Tensor)}
    return replace(record, **{name: moved(value, device) for name, value in tensors.items()})


# --- shapes and shares of a sequence ---------------------------------------------------------------------------------


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
