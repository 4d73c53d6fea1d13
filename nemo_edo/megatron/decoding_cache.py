"""Megatron's cache of keys and values for decoding, from which ended rows can leave."""

from __future__ import annotations

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
