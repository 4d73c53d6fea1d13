"""Which rows of a batch are packed together, without padding, and which prompts they share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_edo.types import TrainingBatch

COPIES = 4
"""A pack's rows together have at most this many times its tokens, if shared tokens are counted for each row: attention
computes queries, keys and values for every row."""


@dataclass(frozen=True)
class Prompts:
    """What rows of a batch may share: for each row the tokens before its response, and which rows have the same."""

    lengths: list[int]
    """Tokens that a row may share: all before the prompt's last one, which predicts the response's first token."""
    groups: list[int]
    """Rows with the same number have the same prompt."""

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
        """No row shares its prompt."""
        return cls([0] * rows, list(range(rows)))

    def take(self, rows: Sequence[int]) -> Prompts:
        return Prompts([self.lengths[row] for row in rows], [self.groups[row] for row in rows])

    def saved(self, rows: Sequence[int]) -> int:
        """Tokens that are not stored again where consecutive rows have the same prompt."""
        return sum(self.lengths[row] for before, row in pairwise(rows) if self.groups[row] == self.groups[before])


def split_into_packs(
    lengths: Sequence[int], ranks: int, tokens: int, unit: int, prompts: Prompts | None = None
) -> list[list[list[int]]]:
    """Packs of at most ``tokens`` tokens, split over the ranks: for each rank its packs' rows. Neither two packs nor
    two ranks differ by more tokens than the longest piece has: a unit, or units that share a prompt.

    Each piece, the longest first, goes to the pack with the fewest tokens (Graham's rule for equal loads): first with
    as few packs as could do, then with as many more as it takes.
    """
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows in packs cannot keep {unit} rows together")
    longest = max((sum(lengths[start : start + unit]) for start in range(0, len(lengths), unit)), default=0)
    if longest > tokens:
        raise ValueError(f"{unit} rows of {longest} tokens together exceed the {tokens} tokens of a pack")
    prompts = prompts or Prompts.none(len(lengths))
    pieces, sizes = zip(*_pieces(lengths, prompts, ranks, tokens, unit), strict=True)
    count = ranks * math.ceil(sum(sizes) / tokens / ranks)
    while (packs := _even_packs(sizes, count, tokens)) is None:
        count += ranks
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


def _even_packs(sizes: Sequence[int], count: int, tokens: int) -> list[list[int]] | None:
    """``count`` packs of the indices of ``sizes``; None where one would exceed ``tokens``."""
    packs: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, place) for place in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable: the same on every rank
        load, place = loads[0]
        if load + sizes[index] > tokens:
            return None
        packs[place].append(index)
        heapq.heapreplace(loads, (load + sizes[index], place))
    return packs
