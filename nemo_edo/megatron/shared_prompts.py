"""Packs in which responses to one prompt share it: the prompt's tokens enter the model once.

A prompt's hidden states do not depend on what follows, so all that a layer computes of a token by itself (projections,
norms, the MLP) is computed once for a prompt, exactly. Attention alone sees whole sequences: their queries, keys and
values are put together for it from the pack, and its results are taken apart again (``SDPAttention``). The prompt's
last token is not shared: what it predicts is a response's own first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_edo.data.shares import Prompts
from nemo_edo.megatron.packing import ModelInputs
from nemo_edo.types import TrainingBatch

FULL = 0.75  # in a block, every sequence has at least this share of the longest one's length


@dataclass
class SharedPrompts(PackedSeqParams):
    """Where a pack's sequences are; its first u of t tokens belong to them, the rest is padding. Attention works on
    copies of the tokens: on padded blocks of sequences of similar length, one block's copies after the other's."""

    positions: Tensor | None = None  # [t] each token's place in its own sequence
    blocks: tuple[tuple[int, int], ...] = ()  # the blocks' sequences and padded lengths
    of: Tensor | None = None  # [c] the index of the token that each copy is made of; arbitrary after a sequence's end
    originals: Tensor | None = None  # [u] for each token one of its copies
    others: Tensor | None = None  # shared tokens' other copies

    def spread(self, tokens: Tensor) -> list[Tensor]:
        """The pack's [t, ...] as each block's [rows, length, ...]."""
        copies = _Spread.apply(tokens, self.of, self.originals, self.others)
        parts = copies.split([rows * length for rows, length in self.blocks])
        return [part.unflatten(0, block) for part, block in zip(parts, self.blocks, strict=True)]

    def gather(self, blocks: Sequence[Tensor]) -> Tensor:
        """The pack's [t, ...] of blocks [rows, length, ...]: one of a token's copies; zeros for padding."""
        copies = [block.flatten(0, 1) for block in blocks]
        return _padded_rows(torch.cat(copies) if len(copies) > 1 else copies[0], self.originals, len(self.positions))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, of: Tensor, originals: Tensor, others: Tensor) -> Tensor:
        ctx.save_for_backward(of, originals, others)
        ctx.length = len(tokens)
        return tokens.index_select(0, of)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of, originals, others = ctx.saved_tensors
        total = _padded_rows(gradient, originals, ctx.length)
        return total.index_add_(0, of[others], gradient.index_select(0, others)), None, None, None


def _padded_rows(source: Tensor, rows: Tensor, length: int) -> Tensor:
    """[length, ...]: the given rows of the source, then zeros."""
    return F.pad(source.index_select(0, rows), (0, 0) * (source.ndim - 1) + (0, length - len(rows)))


def shared_inputs(
    micro: TrainingBatch, lengths: Sequence[int], prompts: Prompts, shape: tuple[int, int]
) -> ModelInputs:
    """One row: for each run of rows with the same prompt, the prompt and then each row's other tokens (``lengths`` - 1
    in all per row); then padding up to ``shape``."""
    device = micro.tokens.device
    places, kept, own = _places(lengths, prompts, device)

    def packed(rows: Tensor) -> Tensor:
        pack = torch.zeros(shape[1], *rows.shape[2:], dtype=rows.dtype, device=device)
        pack[places[own]] = rows[own]
        return pack[None]

    blocks = _blocks(lengths)

    def copies(rows: Tensor) -> Tensor:
        return torch.cat([rows[chosen, :length].flatten() for chosen, length in blocks])

    of, original = copies(places), copies(own)
    positions = packed(torch.arange(places.shape[1], device=device).expand_as(places))
    packed_seq_params = SharedPrompts(
        qkv_format="thd",
        max_seqlen_q=max(lengths) - 1,
        max_seqlen_kv=max(lengths) - 1,
        positions=positions[0],
        blocks=tuple((len(chosen), length) for chosen, length in blocks),
        of=of,
        originals=original.nonzero().squeeze(-1)[of[original].argsort()],
        others=(copies(kept) & ~original).nonzero().squeeze(-1),
    )
    return ModelInputs.of(micro, packed, positions, packed=packed_seq_params, kept=kept, places=places)


def _places(lengths: Sequence[int], prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors [rows, longest]: each token's index in the pack (0 after the row's end), whether the row has this
    token, and whether this row writes it: the tokens after its prompt, and the prompt where the row begins a run."""
    numbers, free, prompt = [], 0, 0
    for row, (length, shared, group) in enumerate(zip(lengths, prompts.lengths, prompts.groups, strict=True)):
        begins = row == 0 or group != prompts.groups[row - 1]
        if begins:
            prompt = free
            free += shared
        numbers.append((prompt, free - shared, shared, 0 if begins else shared, length - 1))
        free += length - 1 - shared
    prompts_at, rest_at, shared, first, count = torch.tensor(numbers, device=device).T[..., None]
    column = torch.arange(max(lengths) - 1, device=device)
    kept = column < count
    places = torch.where(column < shared, prompts_at, rest_at) + column
    return places.where(kept, 0), kept, kept & (column >= first)


def _blocks(lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """Rows of similar length, and how many tokens of the longest of them enter the model."""
    blocks: list[tuple[list[int], int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not blocks or lengths[row] - 1 < FULL * blocks[-1][1]:
            blocks.append(([], lengths[row] - 1))
        blocks[-1][0].append(row)
    return blocks
