"""Numbers for words, equal for equal words and for no others.

A dict would do, but with a large vocabulary almost every look-up waits for memory several times over, one word after
the
other. So a table in NumPy, which looks up many words at a time, comes before the dict. It stores whole words, up to 15
bytes of UTF-8 and their length, so that no hash collision can merge two words; words that are not in it go to the dict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import numpy as np

SLOT_BITS = 20
"""2^20 rows of 32 bytes. Memory is taken as words arrive; most of 152,000 words get a separate row."""
FEW_WORDS = 2**14
"""Below this the dict alone is faster: the table's memory would be new to the processor."""
LONGEST = 15
"""Bytes of a word that fit into two numbers of 64 bits, with a byte for the length."""
_FIRST_BYTES = np.array([2 ** (8 * kept) - 1 for kept in range(9)], dtype=np.uint64)
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)
"""Odd, with bits in no pattern (Knuth's multiplicative hashing): the highest bits of a product depend on all bits."""


class WordIds:
    """Gives each word, as it first comes, the next number from 0."""

    def __init__(self) -> None:
        self._ids: defaultdict[str, int] = defaultdict(count().__next__)
        self._table = np.zeros((2**SLOT_BITS, 4), dtype=np.uint64)
        """A word's two numbers and its id; the fourth column makes a row half a cache line."""

    def __call__(self, words: Sequence[str]) -> np.ndarray:
        """[W] words, none empty or with a blank in it, to their int64 ids."""
        if len(words) < FEW_WORDS:
            return np.fromiter(map(self._ids.__getitem__, words), dtype=np.int64, count=len(words))
        low, high, short = _two_numbers(words)
        slots = (low * _MULTIPLIERS[0] ^ high * _MULTIPLIERS[1]) >> np.uint64(64 - SLOT_BITS)
        slots = slots.view(np.int64)
        rows = self._table.take(slots, axis=0)
        ids = rows[:, 2].astype(np.int64)
        missing = np.flatnonzero(~(short & (rows[:, 0] == low) & (rows[:, 1] == high)))
        ids[missing] = [self._ids[words[i]] for i in missing.tolist()]
        free = missing[short[missing] & (rows[missing, 1] == 0)]
        taken, first = np.unique(slots[free], return_index=True)
        free = free[first]  # one of the words that want the same row
        self._table[taken, :3] = np.stack([low[free], high[free], ids[free].view(np.uint64)], axis=1)
        return ids


def _two_numbers(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first 8 bytes of each word, the next 7 with its length on top, and whether that is the whole word."""
    data = " ".join(words).encode("utf-8", "surrogatepass") + b" " + bytes(16)
    ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord(" "))
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    eight_bytes = np.ndarray(len(data) - 7, dtype="<u8", buffer=data, strides=(1,))  # those from each byte on
    low = eight_bytes[starts] & _FIRST_BYTES[np.minimum(lengths, 8)]
    high = eight_bytes[starts + 8] & _FIRST_BYTES[np.clip(lengths - 8, 0, 7)]
    return low, high | lengths.view(np.uint64) << np.uint64(56), lengths <= LONGEST
