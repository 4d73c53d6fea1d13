import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.metrics import distinct_counts, words
from nemo_edo.metrics.words import WordIds

ALPHABETS = {
    "short": st.text("ab", min_size=1, max_size=3),
    "around the ends of both numbers": st.text("ab", min_size=6, max_size=18),
    "any characters, of several bytes, zeros and lone surrogates": st.text(
        st.sampled_from(["a", "\0", "\xff", "\u4e2d", "\U0001f600", "\ud800"]), min_size=1, max_size=6
    ),
}


@pytest.fixture(params=[1, 3, 20], ids="{} bits".format)
def numpy_table(request, monkeypatch):
    """Even the fewest words go through the table; with one bit nearly all of them want the same row."""
    monkeypatch.setattr(words, "FEW_WORDS", 0)
    monkeypatch.setattr(words, "SLOT_BITS", request.param)


@pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=ALPHABETS)
def test_words_have_equal_ids_exactly_where_they_are_equal(numpy_table, alphabet):
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(batches=st.lists(st.lists(alphabet, min_size=1, max_size=20), min_size=1, max_size=4))
    def check(batches):
        ids, seen = WordIds(), {}
        for batch in batches + batches:
            for word, number in zip(batch, ids(batch).tolist(), strict=True):
                assert seen.setdefault(word, number) == number
        assert sorted(seen.values()) == list(range(len(seen)))

    check()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 14, 15, 16, 17])
def test_one_other_byte_anywhere_makes_another_word(numpy_table, length):
    base = "x" * length
    others = [base[:i] + "y" + base[i + 1 :] for i in range(length)]
    batch = [base, *others, base + "\0", base + "x", base + 256 * "\0"]  # 256: a length of one byte would wrap
    for words_in_order in (batch, batch[::-1]):
        ids = WordIds()
        first = ids(words_in_order).tolist()  # from the dict, later ones from the table
        assert len(set(first)) == len(batch)
        assert ids(words_in_order[::-1]).tolist() == first[::-1]


def test_distinct_n_of_texts_longer_than_a_batch_agrees_with_sets_of_words():
    rng = np.random.default_rng(0)
    vocabulary = [f"{'long' * (i % 5)}{i}" for i in range(5000)]
    corpus = [[vocabulary[i] for i in rng.zipf(1.3, size=700) % 5000] for _ in range(120)]  # 84,000 words
    ngrams = [tuple(y[i : i + 3]) for y in corpus for i in range(len(y) - 2)]
    assert distinct_counts(map(" ".join, corpus), 3) == (len(set(ngrams)), len(ngrams))
