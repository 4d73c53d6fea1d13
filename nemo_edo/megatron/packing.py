"""What the model sees of a micro-batch, in rows or packed; a layout's shapes; shares of context-parallel ranks.

A rank gets chunks r and 2 C - 1 - r of each sequence's 2 C, whose causal attention costs every rank the same. In a
pack each sequence is padded to a multiple of 2 C and cut by itself, as Transformer Engine's ring attention reads it
(``thd_get_partitioned_indices``). The padding belongs to its sequence, as at the end of a row: causal attention never
looks ahead into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from nemo_edo.data.shares import InputShapes
from nemo_edo.megatron.platform import moved
from nemo_edo.megatron.precision import token_multiple
from nemo_edo.types import TrainingBatch

R = TypeVar("R")


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, and what each layer reads on the host, without waiting for a GPU."""

    lengths: tuple[int, ...] = ()  # tokens of each sequence, its padding included


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch's next-token positions [b, T] as this context-parallel rank's part of the model's input, [r, s]."""

    micro: TrainingBatch
    tokens: Tensor  # [r, s] ids that enter the model
    targets: Tensor  # [r, s] the ids that follow them
    positions: Tensor  # [r, s] each one's place in its own sequence
    read: Tensor  # [n] indices into the r * s positions: those that a loss reads
    is_padding: bool  # whether no token of the micro-batch counts; known before the device computes
    experts: Tensor | None  # [r, s, layers * k] what the routers replay; None: they choose
    packed: PackedSeqParams | None = None  # where the sequences of a pack begin and end; None: a row is a sequence
    kept: Tensor | None = None  # [b, T], True at the positions that are in the pack, row by row; None: there is no pack
    places: Tensor | None = None  # [b, T] indices into the whole pack
    order: Tensor | None = None
    """[s * C] the positions of the whole input in the order of the ranks that have them; None: C is 1."""

    @classmethod
    def of(
        cls, micro: TrainingBatch, layout: Callable[[Tensor], Tensor], positions: Tensor, **pack: Any
    ) -> ModelInputs:
        """layout: takes values at the next-token positions [b, T, ...] to the model's, [r, s, ...]. pack: the rest."""
        experts = None if micro.routed_experts is None else layout(micro.routed_experts)
        tokens, targets = layout(micro.tokens[:, :-1]), layout(micro.tokens[:, 1:])
        read = layout(micro.mask).flatten().nonzero().squeeze(-1)
        return cls(micro, tokens, targets, positions, read, not micro.mask.any(), experts, **pack)

    def to(self, device: torch.device) -> ModelInputs:
        micro, packed = (None if part is None else _moved(part, device) for part in (self.micro, self.packed))
        return replace(_moved(self, device), micro=micro, packed=packed)

    def to_rows(self, values: Tensor) -> Tensor:
        """[b, T] from the values at the positions that this rank's model saw, [r, s]; 0 outside the pack."""
        values = gather_context(values, self.order)
        if self.kept is None:
            rows, length = self.micro.mask.shape
            return values[:rows, :length]
        return values[0].index_select(0, self.places.flatten()).view_as(self.places).where(self.kept, 0)


def row_inputs(micro: TrainingBatch, shape: tuple[int, int]) -> ModelInputs:
    """A row for each sequence, padded to ``shape``; no attention mask, as causal attention never sees the padding."""
    order = context_order((shape[1],))

    def padded(values: Tensor) -> Tensor:
        behind = (0, shape[1] - values.shape[1], 0, shape[0] - values.shape[0])
        return context_share(F.pad(values, (0, 0) * (values.ndim - 2) + behind), order)

    positions = context_share(torch.arange(shape[1])[None], order).expand(shape[0], -1)
    return ModelInputs.of(micro, padded, positions, order=order)


def packed_inputs(micro: TrainingBatch, lengths: Sequence[int], shape: tuple[int, int]) -> ModelInputs:
    """One row of the sequences' first ``lengths`` - 1 tokens. Where ``shape`` is longer the last sequence is padded, as
    a row would be. Attention and rotary embeddings know the sequences by Megatron's PackedSeqParams."""
    multiple = sequence_multiple(parallel_state.get_context_parallel_world_size())
    own = [math.ceil((length - 1) / multiple) * multiple for length in lengths]
    own[-1] += shape[1] - sum(own)
    order, boundaries = context_order(own), F.pad(torch.tensor(own).cumsum(0), (1, 0))
    starts = boundaries[:-1, None]
    rows = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))
    positions = torch.arange(shape[1]) - starts[rows, 0]
    columns = torch.arange(micro.mask.shape[1])
    kept = columns < torch.tensor(lengths)[:, None] - 1
    there = positions < torch.tensor(lengths)[rows] - 1

    def packed(values: Tensor) -> Tensor:
        pack = values[rows, positions.clamp(max=len(columns) - 1)]
        return context_share(pack.mul_(there.view(-1, *[1] * (pack.ndim - 1)))[None], order)

    boundaries = boundaries.to(torch.int32)
    packed_seq_params = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        # Transformer Engine's ring attention asks for these, and reads them in each layer unless there are no gaps.
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        pad_between_seqs=False,
        max_seqlen_q=max(own),
        max_seqlen_kv=max(own),
        seq_idx=rows[None].to(torch.int32),  # Mamba layers keep the sequences apart by this alone
        lengths=tuple(own),
    )
    places, own_positions = (starts + columns).clamp(max=shape[1] - 1), context_share(positions[None], order)
    return ModelInputs.of(micro, packed, own_positions, packed=packed_seq_params, kept=kept, places=places, order=order)


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
    sequence = sequence_multiple(context)
    return InputShapes(
        multiple=math.lcm(sequence, context * shares * step),
        sequence=sequence,
        # With two stages, a stage's previous and next neighbours are one process, which receives the shapes of
        # activations and of gradients in another order than they are sent in: they have to be the same.
        uniform=interleaved,
        group=config.pipeline_model_parallel_size if interleaved else 1,
    )


def sequence_multiple(context: int) -> int:
    """The number that divides a sequence's length, with so many context-parallel ranks."""
    return 2 * context if context > 1 else 1


def context_order(lengths: Sequence[int]) -> Tensor | None:
    """``ModelInputs.order`` of sequences of these lengths, one after the other."""
    size = parallel_state.get_context_parallel_world_size()
    if size <= 1:  # 0: without process groups
        return None
    sequences = [places.chunk(2 * size) for places in torch.arange(sum(lengths)).split(list(lengths))]
    return torch.cat([chunks[place] for rank in range(size) for chunks in sequences for place in (rank, -1 - rank)])


def context_share(tensor: Tensor, order: Tensor | None) -> Tensor:
    """This context-parallel rank's positions of a tensor [r, s * C, ...]."""
    if order is None:
        return tensor
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return tensor.index_select(1, order.chunk(size)[rank])


def gather_context(tensor: Tensor, order: Tensor | None) -> Tensor:
    """[r, s * C, ...] from every context-parallel rank's share [r, s, ...], the inverse of ``context_share``. All ranks
    compute the same loss from it; a rank's gradient is that of its share, and Megatron sums the ranks' gradients."""
    if order is None:
        return tensor
    # Of a first dimension, here by the context-parallel group.
    gathered = gather_from_sequence_parallel_region(
        tensor.transpose(0, 1), tensor_parallel_output_grad=False, group=parallel_state.get_context_parallel_group()
    )
    return gathered.index_select(0, order.argsort()).transpose(0, 1)
