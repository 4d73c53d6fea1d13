"""Where a response ends because its text contains a stop string: the one rule for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CUT_CHARACTER = "\ufffd"
"""What decoding shows in place of a character that tokens have only a part of."""


class StopStrings:
    """Some texts, the first of which to appear in a response's text ends the response.

    A string may be spread over several tokens, and a token may go on behind it: the token that completes it belongs to
    the response as it was sampled. Only a token whose own text has a string's last character can complete it, so most
    tokens cost no decoding.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """decode: a response's token ids to text, without special tokens. Raises ValueError for an empty string."""
        if not all(strings):
            raise ValueError(f"stop strings are {list(strings)}, expected texts that are not empty")
        self._strings = tuple(strings)
        self._decode = decode
        self._letters = {string[-1] for string in strings} | {CUT_CHARACTER}
        self._completes: dict[int, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._strings)

    def ended_by(self, ids: Sequence[int]) -> str | None:
        """The string that the last of these tokens completes, where the tokens before it contain none; of several, the
        one that ends first."""
        if not self.may_complete(ids[-1]):
            return None
        text = self._decode(ids)
        ends = [(text.index(string) + len(string), string) for string in self._strings if string in text]
        return min(ends)[1] if ends else None

    def cut(self, ids: Sequence[int]) -> tuple[int, str | None]:
        """How many of the tokens a response has, and the string that ends it; all of them where none does."""
        if self:
            for length in range(1, len(ids) + 1):
                string = self.ended_by(ids[:length])
                if string is not None:
                    return length, string
        return len(ids), None

    def may_complete(self, token: int) -> bool:
        """Whether the text of some tokens that this one ends may end with, or in, its part of a string."""
        if token not in self._completes:
            # Twice: a text that begins with the token may lack the space that it has elsewhere.
            text = self._decode((token, token))
            self._completes[token] = any(letter in text for letter in self._letters)
        return self._completes[token]
