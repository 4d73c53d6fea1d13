"""How different responses are: their texts, by Distinct-n (Li et al. 2016) and Self-BLEU (Zhu et al. 2018), their
final answers, by their number and entropy, and their tokens, by the entropy of the next-token distribution.

Distinct-n is exact and counts by sorting: an n-gram becomes one 64-bit number. Where n ids do not fit into 64 bits,
shorter grams are replaced by their ranks first, which need at most 32.
"""

import math
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nemo_edo.metrics.intervals import whole_number


def distinct_counts(samples: Iterable[str | ArrayLike], n: int = 4) -> tuple[int, int]:
    """(distinct n-grams, n-grams) over all samples together; no n-gram crosses from one sample to the next.

    samples: all texts, or all sequences of token ids (list, tuple, NumPy array, tensor [T]); read once, so a generator
    is accepted. A text is split on whitespace, so its n-grams are of words and symbols between blanks. Ids are any
    integers of 64 bits with a sign; they count by value, whatever their container.
    Memory: about 40 bytes for each token of all samples, and each distinct word of texts once.
    Raises ValueError for n below 1, texts mixed with ids, and a sample that is neither.
    """
    n = whole_number("n", n, least=1)
    codes, lengths, _ = _codes(samples, n)
    if not lengths:
        return 0, 0
    keys = _ngram_keys(codes, n)[_within_samples(lengths, n)]
    keys.sort()
    return 1 + int(np.count_nonzero(keys[1:] != keys[:-1])), len(keys)


def distinct_n(samples: Iterable[str | ArrayLike], n: int = 4) -> float:
    """Distinct n-grams / n-grams, over all samples; 0.0 where no sample is n tokens long. See ``distinct_counts``."""
    distinct, total = distinct_counts(samples, n)
    return distinct / total if total else 0.0


def pooled_distinct(groups: Iterable[Sequence[str] | Sequence[ArrayLike]], n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Distinct-n over the samples of all groups together, such as the responses to every problem, by group.

    Returns (sums [P], counts [P]) float64: sum(sums) / sum(counts) is ``distinct_n`` of all samples, the counts are the
    groups' n-grams. A group's sum has the n-grams that it alone has, and an equal part of those that several have:
    without a group, exactly its own n-grams are gone, so that the variance that the ratio's linear approximation gives
    is the jackknife's over groups, which errs upwards (Efron and Stein 1981). Errors as for ``distinct_counts``.
    """
    n = whole_number("n", n, least=1)
    all_groups = [list(group) for group in groups]
    codes, lengths, places = _codes((sample for group in all_groups for sample in group), n)
    owners_of_samples = np.repeat(np.arange(len(all_groups)), [len(group) for group in all_groups])
    sums_P, counts_P = np.zeros(len(all_groups)), np.zeros(len(all_groups))
    if not lengths:
        return sums_P, counts_P
    within = _within_samples(lengths, n)
    keys = _ngram_keys(codes, n)[within]
    owners = np.repeat(owners_of_samples[places], lengths)[: len(within)][within]
    order = np.argsort(keys)
    keys, sorted_owners = keys[order], owners[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    lowest, highest = np.minimum.reduceat(sorted_owners, first), np.maximum.reduceat(sorted_owners, first)
    own = lowest == highest
    counts_P += np.bincount(owners, minlength=len(all_groups))
    sums_P += np.bincount(lowest[own], minlength=len(all_groups))
    has_any = counts_P > 0
    sums_P[has_any] += float(np.count_nonzero(~own)) / np.count_nonzero(has_any)
    return sums_P, counts_P


def self_bleu(texts: Iterable[str], n: int = 4, *, max_references: int | None = None, seed: int = 0) -> float:
    """Mean over texts of the BLEU of each with the others as references (Zhu et al. 2018): 0 to 1, 1 if all are alike.

    BLEU of one text (Papineni et al. 2002) is NLTK's: words split on whitespace, n-grams of orders 1 to n with equal
    weights, brevity penalty against the closest reference length. An order without a match counts 0.1 matches
    (smoothing method 1 of Chen and Cherry 2014, as in Zhu et al.'s code), except that a text without a single known
    word has 0. Of a text shorter than n words, the orders that it has are taken.

    The cost grows with the square of the number of texts. max_references: each text is compared with as many others
    at most, sampled at random by ``seed``; None: with all.
    Raises ValueError for fewer than two texts, anything that is not a text, and n or max_references below 1, and
    ImportError where NLTK is missing.
    """
    n = whole_number("n", n, least=1)
    texts = [texts] if isinstance(texts, str) else list(texts)
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"texts are {texts!r:.80}, expected at least two texts")
    limit = len(texts) if max_references is None else whole_number("max_references", max_references, least=1)
    try:
        from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    except ImportError as error:
        raise ImportError("self_bleu needs NLTK: pip install nltk") from error
    words = [text.split() for text in texts]
    smoothing, numbers = SmoothingFunction(epsilon=0.1).method1, random.Random(seed)
    scores = []
    for index, hypothesis in enumerate(words):
        references = words[:index] + words[index + 1 :]
        if limit < len(references):
            references = numbers.sample(references, limit)
        order = max(min(n, len(hypothesis)), 1)  # an empty text has 0 whatever its order
        scores.append(sentence_bleu(references, hypothesis, [1 / order] * order, smoothing))
    return float(np.mean(scores))


def distinct_answers(answers: Iterable[Hashable | None]) -> int:
    """The number of different answers among the responses to one prompt, abstentions not counted."""
    return len({answer for answer in answers if answer is not None})


def answer_entropy(answers: Iterable[Hashable | None], *, normalized: bool = False) -> float:
    """Entropy in nats of the answers' observed shares, H = -sum p log p, over the non-abstaining responses to a prompt.

    From 0.0, where all that answer agree or none answers, to log A, where A answers all differ. normalized: divided by
    that log A, from 0 to 1 (0.0 for fewer than two answers).
    This plug-in estimate (Shannon 1948) is too low for few responses: compare it at equal numbers of them.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    total = counts.total()
    if total < 2:
        return 0.0
    highest = math.log(total)
    entropy = min(math.fsum(count / total * math.log(total / count) for count in counts.values()), highest)
    return entropy / highest if normalized else entropy


def _within_samples(lengths: Sequence[int], n: int) -> np.ndarray:
    """[N - n + 1] bool for the n-grams of samples end to end: False for those that end in another sample."""
    within = np.ones(sum(lengths) - n + 1, dtype=bool)
    ends = np.cumsum(lengths)[:-1]
    for back in range(1, n):
        within[ends - back] = False
    return within


def _codes(samples: Iterable[str | ArrayLike], n: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Every token of the samples with n tokens or more as int64, end to end, the lengths of those samples, and their
    places among all. Words are numbered as they first come.

    They are appended to one growing buffer as they come: Python objects of one sample only exist at a time.
    """
    if isinstance(samples, str):
        raise ValueError(f"samples are one text, {samples[:40]!r}, expected several samples")
    buffer, kinds = array("q"), set()
    lengths: list[int] = []
    places: list[int] = []
    ids: defaultdict[str, int] = defaultdict(count().__next__)
    for index, sample in enumerate(samples):
        kinds.add(isinstance(sample, str))
        if len(kinds) > 1:
            raise ValueError(f"samples mix texts and token ids: sample {index} is {sample!r:.80}")
        if isinstance(sample, str):
            words = sample.split()
            tokens = np.fromiter(map(ids.__getitem__, words), dtype=np.int64, count=len(words))
        else:
            tokens = _token_ids(sample, index)
        if len(tokens) >= n:
            lengths.append(len(tokens))
            places.append(index)
            buffer.frombytes(tokens.tobytes())
    if len(buffer) >= 2**32:  # ranks of 32 bits are what lets two of them fit into a key
        raise ValueError(f"samples hold {len(buffer)} tokens, expected fewer than 2**32")
    return np.frombuffer(buffer, dtype=np.int64), lengths, places


def _token_ids(sample: ArrayLike, index: int) -> np.ndarray:
    if hasattr(sample, "is_floating_point"):
        tensor: Any = sample  # torch's; bfloat16, which NumPy lacks, becomes a type that is refused below
        sample = (tensor.float() if tensor.is_floating_point() else tensor).numpy(force=True)
    ids = np.asarray(sample)
    if ids.ndim == 1 and (ids.size == 0 or ids.dtype.kind == "i" or (ids.dtype.kind == "u" and ids.max() < 2**63)):
        return np.ascontiguousarray(ids, dtype=np.int64)
    raise ValueError(
        f"sample {index} is {sample!r:.80}, expected a text or a one-dimensional sequence of integers of 64 bits"
    )


def _ngram_keys(codes: np.ndarray, n: int) -> np.ndarray:
    """[N - n + 1] uint64 for N int64 codes: equal where, and only where, the n codes that start there are equal."""
    grams = codes.view(np.uint64) - codes.min().view(np.uint64)  # modulo 2**64: no overflow from a negative lowest
    length = 1  # of the grams
    while True:
        width = max(int(grams.max()).bit_length(), 1)
        pieces = min(-(-n // length), 64 // width)
        if pieces > 1 or n == length:
            longer = min(n, pieces * length)
            positions = len(grams) + length - longer
            keys = np.zeros(positions, dtype=np.uint64)
            for piece in range(pieces):
                start = min(piece * length, longer - length)  # the last piece may overlap the one before
                keys <<= np.uint64(width)
                keys |= grams[start : start + positions]
            if longer == n:
                return keys
            grams, length = keys, longer
        grams = np.unique(grams, return_inverse=True)[1].astype(np.uint64)
