import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import distinct_counts, distinct_n

few = settings(max_examples=40, deadline=None, derandomize=True)
samples = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=6)
orders = st.integers(1, 5)


@few
@given(corpus=samples, n=orders)
def test_distinct_n_lies_in_zero_to_one_and_is_one_iff_no_ngram_repeats(corpus, n):
    ngrams = [tuple(y[i : i + n]) for y in corpus for i in range(len(y)) if i + n <= len(y)]
    value = distinct_n(corpus, n)
    if not ngrams:
        assert value == 0.0
    else:
        assert 0 < value <= 1
        assert (value == 1) == (max(map(ngrams.count, ngrams)) == 1)


@few
@given(corpus=samples, n=orders)
def test_doubling_the_corpus_halves_distinct_n(corpus, n):
    assert distinct_n(corpus + corpus, n) == distinct_n(corpus, n) / 2


@few
@given(corpus=samples, n=orders)
def test_texts_and_token_ids_that_correspond_have_the_same_counts(corpus, n):
    texts = ["  ".join(map(str, y)) + "\n" for y in corpus]
    assert distinct_counts(texts, n) == distinct_counts(corpus, n)


def test_ngrams_never_cross_responses():
    assert distinct_counts([[1, 2], [3, 4]], 2) == (2, 2)
    assert distinct_counts(["a b", "c d"], 3) == (0, 0)


def test_the_default_order_is_four():
    assert distinct_counts(["1 2 3 4 5", "1 2 3 4"]) == (2, 3)
    assert distinct_n(["1 2 3 4 5", "1 2 3 4"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("convert", [tuple, torch.tensor, np.array])
def test_token_ids_count_by_value_whatever_holds_them(convert):
    assert distinct_counts([convert([1, 2, 1, 2])], 2) == (2, 3)


def test_an_order_below_one_is_an_error():
    with pytest.raises(ValueError, match="n is 0"):
        distinct_n(["a"], 0)
