"""A global batch in shares, one for each data-parallel rank, with its own rows cut into micro-batches. Rows of a
micro-batch are padded to the longest, or packed one after the other, and may then share their prompts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from nemo_edo.config import MicroBatchConfig
from nemo_edo.data.batching import sequence_lengths
from nemo_edo.types import TrainingBatch

COPIES = 4
"""A pack's rows together have at most this many times its tokens, if shared tokens are counted for each row: attention
computes queries, keys and values for every row."""


@dataclass(frozen=True)
class Prompts:
    """What rows of a batch may share: for each row the tokens before its response, and which rows have the same."""

    lengths: list[int]  # tokens that a row may share: all before the prompt's last one
    groups: list[int]  # rows with the same number have the same prompt

    @classmethod
    def of(cls, batch: TrainingBatch) -> Prompts:
        """The prompts of a batch whose mask begins, in each row, at the prompt's last token."""
        begins = (batch.mask != 0).int().argmax(dim=1).tolist()
        tokens = batch.tokens.cpu().numpy()
        numbers: dict[bytes, int] = {}
        texts = (tokens[row, : begin + 1].tobytes() for row, begin in enumerate(begins))
        return cls(begins, [numbers.setdefault(text, len(numbers)) for text in texts])

    @classmethod
    def none(cls, rows: int) -> Prompts:
        return cls([0] * rows, list(range(rows)))

    def take(self, rows: Sequence[int]) -> Prompts:
        return Prompts([self.lengths[row] for row in rows], [self.groups[row] for row in rows])

    def saved(self, rows: Sequence[int]) -> int:
        """Tokens that are not stored again where consecutive rows have the same prompt."""
        return sum(self.lengths[row] for before, row in pairwise(rows) if self.groups[row] == self.groups[before])


@dataclass(frozen=True)
class InputShapes:
    """Requirements on the token ids [rows, length] that enter the model."""

    multiple: int = 1  # lengths are multiples of it
    sequence: int = 1  # each sequence of a pack has a multiple of it; ``multiple`` is one, too
    uniform: bool = False  # all micro-batches have one shape
    group: int = 1  # the number of micro-batches is a multiple of it

    def padded(self, tokens: int) -> int:
        """Tokens that a sequence takes of a pack."""
        return math.ceil(tokens / self.sequence) * self.sequence

    def fit(self, shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The smallest shapes (rows, length) that have room for the given ones."""
        fitting = [(rows, math.ceil(length / self.multiple) * self.multiple) for rows, length in shapes]
        if not self.uniform:
            return fitting
        return [(max(rows for rows, _ in fitting), max(length for _, length in fitting))] * len(fitting)


@dataclass(frozen=True)
class Share:
    """A data-parallel rank's rows of a global batch, and how they are cut into micro-batches: as many on every rank."""

    rows: TrainingBatch  # [b, s]: this rank's rows alone, no longer than the longest of them
    places: list[int]  # the rows' places in the global batch
    lengths: list[int]  # tokens of each row
    micro_batches: list[list[int]]  # the rows of each micro-batch; some may be empty
    shapes: list[tuple[int, int]]  # the shapes of the micro-batches' token ids as they enter the model
    packing: bool
    prompts: Prompts | None  # prompts that rows of a pack share; None: each row includes its prompt
    padding_share: float = 0.0  # share of padding in what the model computes of the global batch
    loss_counts: Mapping[str, float] = field(default_factory=dict)  # by term, the global count that divides it


def cut(
    batch: TrainingBatch,
    how: MicroBatchConfig,
    ranks: int,
    required: InputShapes,
    loss_counts: Mapping[str, float] | None = None,
) -> list[Share]:
    """Each of so many data-parallel ranks' share of a global batch, with the counts of the loss's terms."""
    lengths = sequence_lengths(batch)
    inputs = [required.padded(length - 1) if how.packing else length - 1 for length in lengths]
    prompts = Prompts.of(batch) if how.share_prompts else Prompts.none(batch.size)
    if how.packing:
        room, units = how.micro_batch_tokens // required.multiple * required.multiple, range(0, batch.size, batch.unit)
        if max((sum(lengths[start : start + batch.unit]) for start in units), default=0) <= how.micro_batch_tokens:
            # What fits without padding has a pack: of these tokens, and at most a multiple's more.
            padded = (sum(inputs[start : start + batch.unit]) + batch.unit for start in units)
            room = max(room, *padded, 0)
        how = MicroBatchConfig(how.micro_batch_size, max(room, 1), packing=True, share_prompts=how.share_prompts)
    plans = plan_micro_batches([count + 1 for count in inputs], how, ranks, unit=batch.unit, prompts=prompts)
    shares, needed, computed = [], sum(lengths) - len(lengths), 0  # the model sees all tokens of a row but the last
    for plan in plans:
        plan += [[]] * (-len(plan) % required.group)
        shapes = []
        for rows in plan:
            counts = [inputs[row] for row in rows] or [required.padded(1) if how.packing else 1] * batch.unit
            saved = prompts.saved(rows)
            needed -= saved
            shapes.append((1, sum(counts) - saved) if how.packing else (len(counts), max(counts)))
        shapes = required.fit(shapes)
        computed += sum(rows * length for rows, length in shapes)
        places = sorted(chain.from_iterable(plan))
        number = {place: row for row, place in enumerate(places)}
        own = [lengths[place] for place in places]
        shares.append(Share(
            rows=take_rows(batch, places, max(own, default=2)),
            places=places,
            lengths=own,
            micro_batches=[[number[place] for place in rows] for rows in plan],
            shapes=shapes,
            packing=how.packing,
            prompts=prompts.take(places) if how.share_prompts else None,
            loss_counts=loss_counts or {},
        ))  # fmt: skip
    return [replace(share, padding_share=1 - needed / computed) for share in shares]


def plan_micro_batches(
    lengths: Sequence[int], how: MicroBatchConfig, ranks: int, *, unit: int = 1, prompts: Prompts | None = None
) -> list[list[list[int]]]:
    """For each data-parallel rank its micro-batches, each a list of rows: as many on every rank, and some may be empty.

    lengths: tokens of each row of the global batch. Under a bound of tokens, rows of similar length share a
    micro-batch; a pack has as many rows as its tokens allow, whatever ``how.micro_batch_size`` is. unit: rows that stay
    together. prompts: shared by rows of a pack, which stores each prompt once; rows of one prompt are then consecutive.
    Raises ValueError where ``how`` has no room for a unit, or units do not divide the rows.
    """
    rows, tokens = how.micro_batch_size, how.micro_batch_tokens
    if (rows < unit and not how.packing) or len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows in micro-batches of {rows} cannot keep {unit} rows together")
    if how.packing:
        return _packs(lengths, ranks, tokens, unit, prompts or Prompts.none(len(lengths)))
    longest = [max(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
    order = list(range(len(longest)))
    if tokens is not None:
        if max(longest, default=0) * unit > tokens:
            raise ValueError(f"{unit} rows of {max(longest)} tokens exceed the {tokens} tokens of a micro-batch")
        order.sort(key=lambda index: -longest[index])  # stable: the plan is the same on every rank
    plans: list[list[list[int]]] = []
    for rank in range(ranks):  # consecutive units, each micro-batch as full as it may be
        plan: list[list[int]] = []
        width = 0
        for index in order[rank::ranks]:
            units = len(plan[-1]) // unit if plan else rows // unit
            width = max(width, longest[index])
            if units == rows // unit or (tokens is not None and (units + 1) * unit * width > tokens):
                plan.append([])
                width = longest[index]
            plan[-1].extend(range(index * unit, (index + 1) * unit))
        plans.append(plan)
    most = max(map(len, plans))
    return [plan + [[]] * (most - len(plan)) for plan in plans]


def _packs(lengths: Sequence[int], ranks: int, tokens: int, unit: int, prompts: Prompts) -> list[list[list[int]]]:
    """Packs of at most ``tokens`` tokens, split over the ranks: for each rank its packs' rows. Neither two packs nor
    two ranks differ by more tokens than the longest piece has: a unit, or units that share a prompt. Each piece, the
    longest first, goes to the pack with the fewest tokens (Graham's rule for equal loads): first with as few packs as
    could do, then with as many more as it takes."""
    longest = max((sum(lengths[start : start + unit]) for start in range(0, len(lengths), unit)), default=0)
    if longest > tokens:
        raise ValueError(f"{unit} rows of {longest} tokens together exceed the {tokens} tokens of a pack")
    pieces, sizes = zip(*_pieces(lengths, prompts, ranks, tokens, unit), strict=True)
    longest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])  # stable: the same on every rank
    for count in itertools.count(ranks * math.ceil(sum(sizes) / tokens / ranks), ranks):
        packs: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, place) for place in range(count)]
        for index in longest_first:
            load, place = loads[0]
            packs[place].append(index)
            heapq.heapreplace(loads, (load + sizes[index], place))
        if max(loads)[0] <= tokens:
            break
    packs.sort(key=lambda pack: -sum(sizes[index] for index in pack))
    rows = [[row for index in sorted(pack) for row in pieces[index]] for pack in packs]
    return [rows[rank::ranks] for rank in range(ranks)]


def _pieces(
    lengths: Sequence[int], prompts: Prompts, ranks: int, tokens: int, unit: int
) -> Iterator[tuple[list[int], int]]:
    """The rows, cut into pieces that stay together: units of one prompt, as many as a pack and a fair share of the
    ranks have room for. With each, what it takes of a pack's tokens."""
    of_prompt: dict[int, list[range]] = {}
    for start in range(0, len(lengths), unit):
        of_prompt.setdefault(prompts.groups[start], []).append(range(start, start + unit))
    most = math.ceil(len(lengths) / unit / ranks) * unit
    for units in of_prompt.values():
        piece: list[int] = []
        copies = saved = 0
        for rows in units:
            more, again = sum(lengths[row] for row in rows), prompts.saved([*piece[-1:], *rows])
            if piece and (len(piece) + unit > most or _weight(copies + more, saved + again) > tokens):
                yield piece, _weight(copies, saved)
                piece, copies, saved, again = [], 0, 0, prompts.saved(rows)
            piece, copies, saved = [*piece, *rows], copies + more, saved + again
        yield piece, _weight(copies, saved)


def _weight(copies: int, saved: int) -> int:
    """The tokens of a pack that rows with ``copies`` tokens take, ``saved`` of which are shared."""
    return max(copies - saved, math.ceil(copies / COPIES))


def take_rows(batch: TrainingBatch, rows: Sequence[int], length: int) -> TrainingBatch:
    """The given rows, cut to ``length`` tokens; without any, rows that are all padding (``batch.unit`` of them)."""
    if not rows:
        empty = batch.rows(slice(0, batch.unit)).cut(length)
        return TrainingBatch(**{name: torch.zeros_like(value) for name, value in empty.tensors().items()})
    return batch.rows(torch.tensor(rows, device=batch.tokens.device)).cut(length)


def joined(shares: Sequence[Share], values: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """[2, B, T] of a global batch from its shares' ``share_values``. shape: [B, T]."""
    whole = torch.zeros(2, *shape)
    for share, own in zip(shares, values, strict=True):
        whole[:, share.places, : own.shape[-1]] = own[:, : len(share.places)]
    return whole
