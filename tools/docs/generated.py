"""What the tools of this folder write into a page: the part between two markers."""

from __future__ import annotations


def between_markers(page: str, begin: str, end: str, content: str) -> str:
    """The page with ``content`` between its two markers. Raises ValueError unless it has one of each, in order."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"the page needs one line {begin!r} and, below it, one line {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"
