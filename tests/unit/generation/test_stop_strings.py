"""A response ends with the first token that makes its text contain a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.generation.stop_strings import StopStrings

PIECES = ["a", "b", "\n", " ", "\n\n", "a\n", " b", "b\na", "ab", "\nb ", "", "aab"]


def pieces(ids) -> str:
    """A tokenizer with overlapping tokens."""
    return "".join(PIECES[i] for i in ids)


def without_first_space(ids) -> str:
    """As SentencePiece decodes: the space of a text's first token is left out."""
    return pieces(ids).removeprefix(" ")


def utf8(ids) -> str:
    """A token for each byte: a character may take several."""
    return bytes(ids).decode(errors="replace")


def first_cut(strings, decode, ids) -> tuple[int, bool]:
    """By the definition: the shortest beginning whose text contains a string."""
    for length in range(1, len(ids) + 1):
        if any(string in decode(ids[:length]) for string in strings):
            return length, True
    return len(ids), False


@pytest.mark.parametrize("decode", [pieces, without_first_space])
@given(strings=st.lists(st.text("ab\n ", min_size=1, max_size=3), max_size=3),
       ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_the_cut_is_the_shortest_beginning_whose_text_contains_a_string(decode, strings, ids):
    length, string = StopStrings(strings, decode).cut(ids)
    assert (length, string is not None) == first_cut(strings, decode, ids)
    assert string is None or string in decode(ids[:length])


@given(strings=st.lists(st.text("é。\n😀a", min_size=1, max_size=2), min_size=1, max_size=2),
       text=st.text("é。\n😀ab", max_size=8))
def test_characters_of_several_tokens_are_found_once_they_are_whole(strings, text):
    ids = list(text.encode())
    length, string = StopStrings(strings, utf8).cut(ids)
    assert (length, string is not None) == first_cut(strings, utf8, ids)


def test_without_strings_everything_is_kept_and_nothing_decoded_and_an_empty_one_is_refused():
    strings = StopStrings([], lambda ids: pytest.fail("decoded"))
    assert not strings and strings.cut([1, 2, 3]) == (3, None)
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""], pieces)
