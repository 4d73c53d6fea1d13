"""Megatron's cache for decoding, from which ended rows can leave, and one that stores a prompt once for all responses.

At each new token attention reads all keys and values of a row, and for rows of one prompt most of them are the same.
Here the prompt's are read once for all of its rows, as one product of matrices (Juravsky et al. 2024, "Hydragen"); the
softmax is over both parts at once, so nothing is approximated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def joined(contexts: Sequence[CacheContext]) -> CacheContext:
    """The rows of all of them, one context after the other, each from place 0 on; the shorter ones are followed by
    zeros, which a weight of 0 leaves out where other numbers might not be finite. Empties the contexts."""
    if len(contexts) == 1:
        return contexts[0]
    longest = max(context.sequence_len_offset for context in contexts)
    whole = CacheContext(sum(one.max_batch_size for one in contexts), longest, by_head=contexts[0].by_head)
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


class PromptCacheContext(CacheContext):
    """A cache for what follows the prompts alone; ``RotatingSelfAttention`` hands the prompts' part to the core of the
    attention. Positions count from the prompts' end; rows that are added later begin at later places."""

    def __init__(self, prompts: CacheContext, owner: Tensor, length: int, lengths: Tensor) -> None:
        """prompts: the cache of a forward pass over the prompts, which this empties. owner: [rows] each row's prompt.
        length: tokens that a row has at most, those of its prompt among them. lengths: [rows] how much of the prompts'
        cache precedes each row, whose positions count from there."""
        super().__init__(max_batch_size=len(owner), max_sequence_length=length, by_head=True)
        self.prefix = prompts.sequence_len_offset
        self._places = length - self.prefix
        self._set_rows(owner, lengths, torch.zeros_like(lengths))
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values [prompts, groups, length, width]
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
        """More rows, whose first tokens are the next ones; arguments as of ``__init__``."""
        filled = self.sequence_len_offset
        used, there = torch.unique(self._owner, return_inverse=True)  # the prompts that still have rows
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
        self.prefix = longest
        begins = torch.cat([self._begins, torch.full_like(lengths, filled)])
        self._set_rows(torch.cat([there, owner + len(used)]), torch.cat([self._starts, lengths]), begins)
        self.max_batch_size, self.max_sequence_length = count, longest + self._places

    def _set_rows(self, owner: Tensor, starts: Tensor, begins: Tensor) -> None:
        """[rows] each row's prompt, its first position after it, and the place of the cache that this one is in."""
        self._owner, self._starts, self._begins = owner, starts, begins
        position, place = (torch.arange(count, device=owner.device) for count in (self.prefix, self._places))
        self._outside = (position >= starts[:, None])[:, None, None]  # of the prompt: after the row's own ends
        self._before = (place < begins[:, None])[:, None, None]  # of the cache: before the row's first token
        counts = torch.bincount(owner, minlength=1)
        order = owner.argsort(stable=True)
        within = torch.empty_like(owner)
        within[order] = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
        self._most = int(counts.max())  # rows of the prompt that has the most of them
        self._index = owner * self._most + within  # of each row among prompts x most

    def positions(self, queries: int) -> Tensor:
        """[rows, queries] of the next tokens."""
        first = self.sequence_len_offset + self._starts - self._begins
        return first[:, None] + torch.arange(queries, device=first.device)

    def prompt_scores(self, layer: int, queries: Tensor) -> Tensor:
        """[rows, groups, n, prefix] of scaled queries [rows, groups, n, width] of the layer with this number."""
        keys, _ = self._prompts[layer]
        return self._product(queries, keys.transpose(-1, -2)).masked_fill(self._outside, -math.inf)

    def own_scores(self, scores: Tensor) -> Tensor:
        """Scores [rows, groups, n, k] of the first k places of the cache, without those of others."""
        return scores.masked_fill(self._before[..., : scores.shape[-1]], -math.inf)

    def prompt_values(self, layer: int, weights: Tensor) -> Tensor:
        """[rows, groups, n, width] of weights [rows, groups, n, prefix]."""
        return self._product(weights, self._prompts[layer][1])

    def _product(self, rows: Tensor, of_prompts: Tensor) -> Tensor:
        """[rows, groups, n, ...] of [rows, groups, n, k] and, for each prompt, matrices [prompts, groups, k, ...]: one
        product for all rows of a prompt, which are padded to the most that one has."""
        padded = rows.new_zeros(len(of_prompts) * self._most, *rows.shape[1:]).index_copy_(0, self._index, rows)
        by_prompt = padded.unflatten(0, (len(of_prompts), self._most)).transpose(1, 2)
        result = (by_prompt.flatten(2, 3) @ of_prompts).unflatten(2, by_prompt.shape[2:4])
        return result.transpose(1, 2).flatten(0, 1).index_select(0, self._index)

    def keep(self, rows: Tensor, since: int = 0) -> None:
        """As ``CacheContext``, without the places before the first token of any row that is kept."""
        since = int(self._begins[rows].min()) if len(rows) else self.sequence_len_offset
        super().keep(rows, since)
        self._set_rows(self._owner[rows], self._starts[rows], self._begins[rows] - since)
