"""Docstrings as Markdown: a list of arguments, the errors in a separate paragraph.

The docstrings have a line ``name: meaning`` for each argument, or several, and go on below it. Griffe loads this
extension (mkdocs.yml).
"""

from __future__ import annotations

import re

import griffe

ARGUMENT = re.compile(r"(\w+(?:, \w+)*): (.*)")
PARAGRAPH = re.compile(r"(Raises|Returns|Metrics|No gradient|Memory) ?")
FULL = 112
"""A line that the next line's first word would make longer than this continues below: 120 columns, indented twice."""


class DocstringLists(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = as_markdown(func.docstring.value, names)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        if cls.docstring:
            cls.docstring.value = as_markdown(cls.docstring.value, set(cls.members))


def as_markdown(text: str, names: set[str]) -> str:
    """The docstring with each line ``name: meaning`` of these names as an item, and a paragraph after the items."""
    lines: list[str] = []
    item = False
    previous = ""
    for text_line in text.splitlines():
        line = text_line
        argument = ARGUMENT.match(line)
        starts_item = bool(argument and set(argument[1].split(", ")) <= names)
        if starts_item and not item:
            lines.append("")
        elif item and not starts_item and not _goes_on(previous, line):
            lines.append("")
        elif not item and PARAGRAPH.match(line):
            lines.append("")
        if starts_item:
            shown = ", ".join(f"`{name}`" for name in argument[1].split(", "))
            line = f"- {shown}: {argument[2]}"
        item = starts_item or (item and _goes_on(previous, line))
        lines.append(f"    {line.strip()}" if item and not starts_item else line)
        previous = text_line
    return "\n".join(lines)


def _goes_on(previous: str, line: str) -> bool:
    """Whether an item's line has the rest of the sentence above it: it is indented, or nothing more fitted above."""
    if not line or PARAGRAPH.match(line):
        return False
    return line.startswith(" ") or len(previous) + 1 + len(line.split()[0]) > FULL
