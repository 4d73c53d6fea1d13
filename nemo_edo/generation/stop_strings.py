"""Where a stop string ends a response: one rule for all engines."""

from collections.abc import Callable, Sequence

CUT_CHARACTER = "\ufffd"  # what decoding shows for an incomplete character


class StopStrings:
    """A response ends with the first of these strings in its text. A string may span several tokens, and its last token
    may extend beyond it; that token belongs to the response. Only a token whose text contains a string's last character
    can complete it, so most tokens need no decoding."""

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
        """The string that the last token completes, where those before contain none; of several, the first to end."""
        if not self.may_complete(ids[-1]):
            return None
        text = self._decode(ids)
        ends = [(text.index(string) + len(string), string) for string in self._strings if string in text]
        return min(ends)[1] if ends else None

    def cut(self, ids: Sequence[int]) -> tuple[int, str | None]:
        """The number of tokens up to the end of a string, and that string; all tokens and None without one."""
        if self:
            for length in range(1, len(ids) + 1):
                string = self.ended_by(ids[:length])
                if string is not None:
                    return length, string
        return len(ids), None

    def may_complete(self, token: int) -> bool:
        """Whether a string may end within this token's text."""
        if token not in self._completes:
            # Twice: at the start of a text, a token may lose its leading space.
            text = self._decode((token, token))
            self._completes[token] = any(letter in text for letter in self._letters)
        return self._completes[token]
