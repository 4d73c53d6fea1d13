"""Final answers in GSM8K's format: a last line ``#### N``."""

from __future__ import annotations

import re

_NUMBER = re.compile(
    r"(?P<sign>[+-]?\$?|\$[+-])"  # -3, $5, -$5, $-5
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)"  # 1,234 or 1234; nothing in .5
    r"(?:\.(?P<fraction>[0-9]*))?"
    r"\.?"  # the full stop of a sentence
)
_MARKER = "####"


def canonical_number(text: str) -> str | None:
    """The one spelling of a number: no sign for zero, no separators, dollar sign, leading or trailing zeros.

    ``"1,234" -> "1234"``, ``"$5" -> "5"``, ``"18.00" -> "18"``, ``"3.50" -> "3.5"``, ``"-3." -> "-3"``. None where the
    text is anything else than a number (units and words included).
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not (match["whole"] or match["fraction"]):
        return None
    whole = match["whole"].replace(",", "").lstrip("0") or "0"
    fraction = (match["fraction"] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if "-" in match["sign"] and number != "0" else number


def final_answer(text: str) -> str | None:
    """The canonical number on the last line that starts with ``####``; None if there is no such line or number."""
    markers = [line for line in _lines(text) if line.startswith(_MARKER)]
    return _marked_number(markers[-1]) if markers else None


def is_well_formed(text: str) -> bool:
    """True if exactly one line is ``#### N``, N a number, and no other text follows it."""
    lines = _lines(text)
    answers = [index for index, line in enumerate(lines) if _marked_number(line) is not None]
    return answers == [len(lines) - 1]


def _lines(text: str) -> list[str]:
    """The non-empty lines, stripped."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _marked_number(line: str) -> str | None:
    return canonical_number(line.removeprefix(_MARKER)) if line.startswith(_MARKER) else None
