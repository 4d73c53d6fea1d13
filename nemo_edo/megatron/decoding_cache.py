"""Megatron's cache for decoding, from which ended rows can leave, and one that stores a prompt once for all responses.

At each new token attention reads all keys and values of a row, and for rows of one prompt most of them are the same.
Here the prompt's are read once for all of its rows, as one product of matrices (Juravsky et al. 2024, "Hydragen"); the
softmax is over both parts at once, so nothing is approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor


class CacheContext(StaticInferenceContext):
    """Megatron's cache, of which rows can leave."""

    def __init__(self, max_batch_size: int, max_sequence_length: int, *, by_head: bool) -> None:
        """by_head: as for ``empty_rows``, of what replaces Megatron's own memory."""
        super().__init__(max_batch_size, max_sequence_length)
        self.by_head = by_head

    @property
    def is_full(self) -> bool:
        """Whether a next token would have no place."""
        return self.sequence_len_offset == self.max_sequence_length

    def keep(self, rows: Tensor, since: int = 0) -> None:
        """Keeps the given rows, in this order, and the places from ``since`` on; a row may occur more than once."""
        filled = self.sequence_len_offset
        for layer, parts in self.key_value_memory_dict.items():
            kept = tuple(empty_rows(part, len(rows), len(part), by_head=self.by_head) for part in parts)
            for part, before in zip(kept, parts, strict=True):
                part[: filled - since] = before[since:filled, rows]
            self.key_value_memory_dict[layer] = kept
        self.max_batch_size, self.sequence_len_offset = len(rows), filled - since


def joined(contexts: Sequence[CacheContext], *, by_head: bool) -> CacheContext:
    """The rows of all of them, one context after the other, each from place 0 on; the shorter ones are followed by
    zeros, which a weight of 0 leaves out where other numbers might not be finite. Empties the contexts."""
    if len(contexts) == 1:
        return contexts[0]
    longest = max(context.sequence_len_offset for context in contexts)
    whole = CacheContext(sum(context.max_batch_size for context in contexts), longest, by_head=by_head)
    whole.sequence_len_offset = longest
    for layer in list(contexts[0].key_value_memory_dict):
        parts = zip(*(context.key_value_memory_dict.pop(layer) for context in contexts), strict=True)
        whole.key_value_memory_dict[layer] = tuple(
            torch.cat([F.pad(part, (0, 0, 0, 0, 0, 0, 0, longest - len(part))) for part in of_contexts], dim=1)
            for of_contexts in parts
        )
    return whole


def empty_rows(cache: Tensor, rows: int, length: int, *, by_head: bool) -> Tensor:
    """A cache [length, rows, groups, width] like another. by_head: in memory a head's positions are consecutive, as
    torch's attention reads them at every token; otherwise it is contiguous, as Megatron's own: Transformer Engine's
    attention would copy any other at every token and layer."""
    if not by_head:
        return cache.new_empty(length, rows, *cache.shape[2:])
    return cache.new_empty(rows, cache.shape[2], length, cache.shape[3]).permute(2, 0, 1, 3)


@dataclass(frozen=True)
class PromptRows:
    """Which rows follow which prompt; converts to [prompts, most, ...]: a prompt's rows, then arbitrary padding."""

    owner: Tensor  # [rows] int64: each row's prompt
    prompts: int
    most: int  # rows of the prompt that has the most of them
    places: Tensor | None  # [rows] int64: each row's index among prompts x most; None: the identity, with no padding

    @classmethod
    def of(cls, owner: Tensor, prompts: int) -> PromptRows:
        counts = torch.bincount(owner, minlength=prompts)
        order = owner.argsort(stable=True)
        begins = counts.cumsum(0) - counts
        within = torch.empty_like(owner)
        within[order] = torch.arange(len(owner), device=owner.device) - begins[owner[order]]
        most = int(counts.max())
        places = owner * most + within
        everywhere = torch.arange(prompts * most, device=owner.device)
        return cls(owner, prompts, most, None if torch.equal(places, everywhere) else places)

    def by_prompt(self, rows: Tensor) -> Tensor:
        """[prompts, most, ...] of [rows, ...]."""
        if self.places is not None:
            padded = rows.new_zeros(self.prompts * self.most, *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows)
        return rows.unflatten(0, (self.prompts, self.most))


@dataclass(frozen=True)
class CachedPrompts:
    """One layer's keys and values of the prompts, each [prompts, groups, length, width]."""

    keys: Tensor
    values: Tensor
    rows: PromptRows
    outside: Tensor | None = None  # [rows, 1, 1, length] bool: positions after the end of the row's prompt
    before: Tensor | None = None  # [rows, 1, 1, places] bool: places of the cache before the row's first token

    def scores(self, queries: Tensor) -> Tensor:
        """[rows, groups, n, length] of scaled queries [rows, groups, n, width]."""
        scores = self._for_prompts(queries, lambda grouped: grouped @ self.keys.transpose(-1, -2))
        return scores if self.outside is None else scores.masked_fill(self.outside, -math.inf)

    def of_own(self, scores: Tensor) -> Tensor:
        """Scores [rows, groups, n, k] of the first k places of the cache, without those of others."""
        return scores if self.before is None else scores.masked_fill(self.before[..., : scores.shape[-1]], -math.inf)

    def context(self, weights: Tensor) -> Tensor:
        """[rows, groups, n, width] of weights [rows, groups, n, length]."""
        return self._for_prompts(weights, lambda grouped: grouped @ self.values)

    def _for_prompts(self, rows: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """A product [prompts, groups, most n, ...] of rows [rows, groups, n, ...], as [rows, groups, n, ...]."""
        by_prompt = self.rows.by_prompt(rows).transpose(1, 2)
        result = product(by_prompt.flatten(2, 3)).unflatten(2, by_prompt.shape[2:4])
        flat, places = result.transpose(1, 2).flatten(0, 1), self.rows.places
        return flat if places is None else flat.index_select(0, places)


class PromptCacheContext(CacheContext):
    """A cache for what follows the prompts alone; ``RotatingSelfAttention`` hands the prompts' part to the core of the
    attention. Positions count from the prompts' end; rows that are added later begin at later places."""

    def __init__(self, prompts: CacheContext, owner: Tensor, length: int, lengths: Tensor | None = None) -> None:
        """prompts: the cache of a forward pass over the prompts, which this empties. owner: [rows] each row's prompt.
        length: tokens that a row has at most, those of its prompt among them. lengths: [rows] how much of the prompts'
        cache precedes each row, whose positions count from there; None: all of it."""
        super().__init__(max_batch_size=len(owner), max_sequence_length=length, by_head=True)
        self.prefix = prompts.sequence_len_offset
        self.starts = lengths
        self._places = length - self.prefix
        self._begins: Tensor | None = None  # [rows] each row's first place; None: the cache's
        self._before: Tensor | None = None
        self._rows = PromptRows.of(owner, prompts.max_batch_size)
        self._outside = None if lengths is None else self._after(lengths)
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in list(prompts.key_value_memory_dict):
            parts = prompts.key_value_memory_dict.pop(layer)  # so that one layer alone is in memory twice
            self._prompts[layer] = tuple(part[: self.prefix].permute(1, 2, 0, 3).contiguous() for part in parts)
            self.key_value_memory_dict[layer] = tuple(
                empty_rows(part, len(owner), self._places, by_head=True) for part in parts
            )

    @property
    def is_full(self) -> bool:
        return self.sequence_len_offset == self._places

    def add(self, prompts: CacheContext, owner: Tensor, lengths: Tensor) -> None:
        """More rows, whose first tokens are the next ones, of a cache with ``lengths``; arguments of ``__init__``."""
        there, filled = self._rows.owner, self.sequence_len_offset
        used, there = torch.unique(there, return_inverse=True)  # the prompts that still have rows
        longest, count = max(self.prefix, prompts.sequence_len_offset), len(there) + len(owner)
        for layer, cached in self._prompts.items():
            added = (part[: prompts.sequence_len_offset] for part in prompts.key_value_memory_dict.pop(layer))
            both = ((old[used], new.permute(1, 2, 0, 3)) for old, new in zip(cached, added, strict=True))
            # Each [prompts, groups, length, width].
            padded = ([F.pad(part, (0, 0, 0, longest - part.shape[2])) for part in pair] for pair in both)
            self._prompts[layer] = tuple(torch.cat(pair) for pair in padded)
            parts = self.key_value_memory_dict[layer]
            grown = tuple(empty_rows(part, count, self._places, by_head=True) for part in parts)
            for part, before in zip(grown, parts, strict=True):
                part[:filled, : len(there)] = before[:filled]
                part[:filled, len(there) :] = 0  # an attention weight of 0 times NaN would be NaN
            self.key_value_memory_dict[layer] = grown
        begins = self.starts.new_zeros(len(there)) if self._begins is None else self._begins
        self._begin_at(torch.cat([begins, begins.new_full((len(owner),), filled)]))
        self.starts, self.prefix = torch.cat([self.starts, lengths]), longest
        self._outside = self._after(self.starts)
        self._rows = PromptRows.of(torch.cat([there, owner + len(used)]), len(used) + prompts.max_batch_size)
        self.max_batch_size, self.max_sequence_length = count, longest + self._places

    def _begin_at(self, begins: Tensor) -> None:
        self._begins = begins
        self._before = (torch.arange(self._places, device=begins.device) < begins[:, None])[:, None, None]

    def _after(self, lengths: Tensor) -> Tensor:
        return (torch.arange(self.prefix, device=lengths.device) >= lengths[:, None])[:, None, None]

    def positions(self, queries: int) -> Tensor | None:
        """[rows, queries] of the next tokens, where they differ by row."""
        if self.starts is None:
            return None
        first = self.starts if self._begins is None else self.starts - self._begins
        return first[:, None] + self.sequence_len_offset + torch.arange(queries, device=self.starts.device)

    def cached_prompts(self, layer: int) -> CachedPrompts:
        """The part of the layer that Megatron gives this number."""
        return CachedPrompts(*self._prompts[layer], self._rows, self._outside, self._before)

    def keep(self, rows: Tensor, since: int = 0) -> None:
        """Keeps these rows, as ``CacheContext`` does, without the places before the first token of any of them."""
        if not len(rows):
            since = self.sequence_len_offset
        elif self._begins is not None:
            since = int(self._begins[rows].min())
        if self._begins is not None:
            self._begin_at(self._begins[rows] - since)
        super().keep(rows, since)
        if self.starts is not None:
            self.starts, self._outside = self.starts[rows], self._outside[rows]
        self._rows = PromptRows.of(self._rows.owner[rows], self._rows.prompts)
