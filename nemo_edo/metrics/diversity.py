"""Distinct-n (Li et al. 2016): how much of a set of responses is not repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def distinct_counts(samples: Iterable[str | Sequence[int]], n: int = 4) -> tuple[int, int]:
    """(distinct n-grams, n-grams) over all samples together; no n-gram crosses from one sample to the next.

    A text is split on whitespace, so its n-grams are of words and symbols between blanks; a sample that is a sequence
    of token ids is taken as it is. Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}, expected at least 1")
    distinct: set[tuple] = set()
    total = 0
    for sample in samples:
        tokens = sample.split() if isinstance(sample, str) else [int(token) for token in sample]
        ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        distinct.update(ngrams)
        total += len(ngrams)
    return len(distinct), total


def distinct_n(samples: Iterable[str | Sequence[int]], n: int = 4) -> float:
    """Distinct n-grams / n-grams, over all samples; 0.0 where no sample is n tokens long. See ``distinct_counts``."""
    distinct, total = distinct_counts(samples, n)
    return distinct / total if total else 0.0
