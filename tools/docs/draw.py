"""Draws a diagram: ``dot`` (Debian: graphviz) makes the SVG next to its text, with a checksum of the text in it.

    python tools/docs/draw.py docs/images/data_flow.dot

A test compares the checksum, so a changed text fails until its picture is made anew.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path


def mark(source: Path) -> str:
    """The comment that a current SVG of this text contains."""
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    return f"<!-- drawn by tools/docs/draw.py from {source.name}, sha256 {checksum} -->"


def draw(source: Path) -> None:
    svg = subprocess.run(["dot", "-Tsvg", source], check=True, capture_output=True, text=True).stdout
    head, tag, body = svg.partition("<svg")
    source.with_suffix(".svg").write_text(f"{head}{mark(source)}\n{tag}{body}", encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(Path(argument))
