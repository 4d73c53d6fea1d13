"""Megatron's cache of keys and values for decoding, from which ended rows can leave."""

from __future__ import annotations

from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor


class CacheContext(StaticInferenceContext):
    """Megatron's cache, of which rows can leave."""

    def keep(self, rows: Tensor) -> None:
        """Keeps the given rows only, in this order; a row may occur more than once."""
        filled = self.sequence_len_offset
        for layer, parts in self.key_value_memory_dict.items():
            kept = tuple(empty_rows(part, len(rows), len(part)) for part in parts)
            for part, before in zip(kept, parts, strict=True):
                part[:filled] = before[:filled, rows]
            self.key_value_memory_dict[layer] = kept
        self.max_batch_size = len(rows)


def empty_rows(cache: Tensor, rows: int, length: int) -> Tensor:
    """A cache [length, rows, groups, width] like another. In memory a head's positions are consecutive:
    attention reads them at every token."""
    return cache.new_empty(rows, cache.shape[2], length, cache.shape[3]).permute(2, 0, 1, 3)
