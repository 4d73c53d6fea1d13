"""Rows with columns of any names as problems: a data file's, or what a custom source makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from nemo_edo.data.answers import canonical_number
from nemo_edo.data.benchmarks import MATH, NUMBER
from nemo_edo.data.rows import RowError
from nemo_edo.types import Problem
from nemo_edo.utils.wording import did_you_mean, shown


@dataclass
class Columns:
    """The columns that make a problem; the others are its metadata. A name that is null: the setting's own name, where
    there is such a column."""

    question: Optional[str] = None
    """What is asked; every row has it."""
    answer: Optional[str] = None
    """The final answer alone: a text or a whole number. Without one, only a custom reward can score."""
    solution: Optional[str] = None
    """The text that a warm-up learns."""
    id: Optional[str] = None
    """A name of the problem, unique in its file: a text or a whole number."""

    @property
    def are_named(self) -> bool:
        return any(value is not None for value in vars(self).values())

    def problem(self, row: Mapping[str, Any], *, stem: str, number: int, source: str) -> Problem:
        """The problem of a row, named ``STEM-ID``; the row's number, from 1, is its id where it has none.

        Raises RowError for a missing column, and for a value that is none of JSON's.
        """
        left = dict(row)
        question = self._text(left, "question")
        if question is None:
            raise RowError(f'has no column "{self.question or "question"}"{_nearest("question", row)}')
        answer, solution, own_id = (self._text(left, name) for name in ("answer", "solution", "id"))
        metadata = plain_values(left)
        answer, kind = answer or "", MATH if canonical_number(answer or "") is None else NUMBER
        return Problem(f"{stem}-{own_id or number}", question, solution or "", answer, source, kind, metadata)

    def _text(self, row: dict[str, Any], name: str) -> str | None:
        """Takes the column out of the row; None where it has none of the setting's own name."""
        column = getattr(self, name) or name
        if column not in row:
            if getattr(self, name) is not None:
                raise RowError(f'has no column "{column}" (data.columns.{name}){_nearest(column, row)}')
            return None
        value = row.pop(column)
        whole = isinstance(value, int) and not isinstance(value, bool) and name in ("answer", "id")
        if not isinstance(value, str) and not whole:
            expected = "a text or a whole number" if name in ("answer", "id") else "a text"
            given = "null" if value is None else shown(value)
            raise RowError(f'column "{column}" is {given}, expected {expected}')
        text = str(value)
        if not text.strip():
            raise RowError(f'column "{column}" is blank, expected a text')
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RowError(f'column "{column}" holds half of a surrogate pair, which no tokenizer can encode')
        return text


def plain_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON has it. Raises RowError for another value."""
    values = {}
    for name, value in metadata.items():
        try:
            values[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise RowError(
                f'column "{name}" is {shown(value)}, which is not a text, a number, true, false, null, or a list or '
                "mapping of them; convert the column, or leave it out"
            ) from error
    return values


def _nearest(name: str, row: Mapping[str, Any]) -> str:
    names = [str(one) for one in row]
    return f"{did_you_mean(name, names, cutoff=0.5)} (its columns: {', '.join(names) or 'none'})"
