"""Parts of error messages: the name that was probably meant, and a value in a few words."""

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``; did you mean NEAREST?``, or nothing where no known name is alike (by ``difflib``'s ratio)."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f"; did you mean {found[0]}?" if found else ""


def printable(text: str) -> str:
    """A text for a terminal: without what moves its cursor, changes its colors or the direction of its letters."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shown(value: Any, limit: int = 80) -> str:
    """A value as Python writes it, with its type, cut after ``limit`` characters."""
    text = repr(value)
    return f"{text if len(text) <= limit else text[:limit] + '...'} ({type(value).__name__})"


def clock_time(seconds: float) -> str:
    """0:12, 1:40 or 2:03:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
