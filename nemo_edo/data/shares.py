"""A global batch in shares, one for each data-parallel rank, with its own rows cut into micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_edo.data.batching import input_shape, padding_share, plan_micro_batches, sequence_lengths, take_rows
from nemo_edo.data.packs import Prompts
from nemo_edo.types import TrainingBatch


@dataclass(frozen=True)
class MicroBatching:
    """How a rank's share of a global batch is cut: memory and speed, never the result."""

    rows: int
    """Most rows of a micro-batch that is not packed."""
    tokens: int | None = None
    """Most tokens of a micro-batch, padding included; None: no such bound, and rows stay in their order."""
    packing: bool = False
    """Rows are packed into one, without padding; it needs ``tokens``."""
    share_prompts: bool = False
    """A pack contains the prompt of several rows once; it needs ``packing``."""

    def __post_init__(self) -> None:
        if self.packing and self.tokens is None:
            raise ValueError("packing needs tokens, the most that a pack may have")
        if self.share_prompts and not self.packing:
            raise ValueError("rows share a prompt within packs only")


@dataclass(frozen=True)
class InputShapes:
    """Requirements on the token ids [rows, length] that enter the model."""

    multiple: int = 1
    """Lengths are multiples of it."""
    uniform: bool = False
    """All micro-batches have one shape."""
    group: int = 1
    """The number of micro-batches is a multiple of it."""

    def fit(self, shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The smallest shapes (rows, length) that have room for the given ones."""
        fitting = [(rows, math.ceil(length / self.multiple) * self.multiple) for rows, length in shapes]
        if not self.uniform:
            return fitting
        return [(max(rows for rows, _ in fitting), max(length for _, length in fitting))] * len(fitting)


@dataclass(frozen=True)
class Share:
    """A data-parallel rank's rows of a global batch, and how they are cut into micro-batches: as many on every rank."""

    rows: TrainingBatch
    """[b, s]: this rank's rows alone, no longer than the longest of them."""
    places: list[int]
    """The rows' places in the global batch."""
    lengths: list[int]
    """Tokens of each row."""
    micro_batches: list[list[int]]
    """The rows of each micro-batch; some may be empty."""
    shapes: list[tuple[int, int]]
    """The shapes of the micro-batches' token ids as they enter the model."""
    packing: bool
    prompts: Prompts | None
    """Prompts that rows of a pack share; None: each row includes its prompt."""
    padding_share: float
    """Share of padding in what the model computes of the global batch."""
    loss_counts: Mapping[str, float] = field(default_factory=dict)
    """For each term of the loss its count over the global batch, which the term is divided by; empty where no loss is
    computed."""


def cut(
    batch: TrainingBatch,
    how: MicroBatching,
    ranks: int,
    required: InputShapes,
    loss_counts: Mapping[str, float] | None = None,
) -> list[Share]:
    """Each of so many data-parallel ranks' share of a global batch, with the counts of the loss's terms."""
    lengths = sequence_lengths(batch)
    prompts = Prompts.of(batch) if how.share_prompts else None
    plans = plan_micro_batches(
        lengths,
        ranks=ranks,
        rows=how.rows,
        tokens=how.tokens // required.multiple * required.multiple if how.packing else how.tokens,
        unit=batch.unit,
        packing=how.packing,
        prompts=prompts,
    )
    plans = [plan + [[]] * (-len(plan) % required.group) for plan in plans]

    def shape(rows: list[int]) -> tuple[int, int]:
        saved = _saved(rows, prompts)
        return input_shape(row_lengths(rows, lengths, batch.unit), packing=how.packing, saved=saved)

    shapes = [required.fit([shape(rows) for rows in plan]) for plan in plans]
    saved = sum(_saved(rows, prompts) for plan in plans for rows in plan)
    padding = padding_share(lengths, itertools.chain(*shapes), saved)
    shares = [_share(batch, lengths, *one, how.packing, prompts, padding) for one in zip(plans, shapes, strict=True)]
    return [replace(share, loss_counts=loss_counts or {}) for share in shares]


def require_tokens(batch: TrainingBatch) -> None:
    """Raises ValueError for a batch without any response token."""
    if not batch.mask.any():
        raise ValueError(f"none of the batch's {batch.size} rows has a response token that counts: nothing to train on")


def _share(
    batch: TrainingBatch,
    lengths: list[int],
    plan: list[list[int]],
    shapes: list[tuple[int, int]],
    packing: bool,
    prompts: Prompts | None,
    padding: float,
) -> Share:
    places = sorted(row for rows in plan for row in rows)
    number = {place: row for row, place in enumerate(places)}
    own = [lengths[place] for place in places]
    rows = take_rows(batch, places, max(own, default=2))
    micro_batches = [[number[place] for place in micro] for micro in plan]
    prompts = None if prompts is None else prompts.take(places)
    return Share(rows, places, own, micro_batches, shapes, packing, prompts, padding)


def _saved(rows: list[int], prompts: Prompts | None) -> int:
    return 0 if prompts is None else prompts.saved(rows)


def row_lengths(rows: list[int], lengths: list[int], unit: int) -> list[int]:
    """Tokens of a micro-batch's rows; one of padding only has ``unit`` of the shortest ones."""
    return [lengths[row] for row in rows] or [2] * unit


def joined(shares: Sequence[Share], values: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """[2, B, T] of a global batch from its shares' ``share_values``. shape: [B, T]."""
    whole = torch.zeros(2, *shape)
    for share, own in zip(shares, values, strict=True):
        whole[:, share.places, : own.shape[-1]] = own[:, : len(share.places)]
    return whole
