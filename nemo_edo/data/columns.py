"""Rows with columns of any names as problems: a data file's, or what a custom source makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from nemo_edo.data.answers import canonical_number
from nemo_edo.data.benchmarks import MATH, NUMBER
from nemo_edo.data.chat import chat_of, question_of
from nemo_edo.data.rows import NAME_COLUMNS, Row, RowError, plain_values, text_of
from nemo_edo.types import Problem
from nemo_edo.utils.wording import did_you_mean


@dataclass
class Columns:
    """The columns that make a problem; the others are its metadata. A name that is null: the setting's own name, where
    there is such a column."""

    question: Optional[str] = None
    """What is asked; every row has it: a text, or a chat that is asked as it is: a list of messages, each with a role
    and a content."""
    answer: Optional[str] = None
    """The final answer alone: a text or a whole number. Without one, only a custom reward can score."""
    solution: Optional[str] = None
    """The text that a warm-up learns."""
    id: Optional[str] = None
    """A name of the problem, unique in its file: a text or a whole number."""

    @property
    def are_named(self) -> bool:
        return any(value is not None for value in vars(self).values())

    def problem(self, row: Row, stem: str) -> Problem:
        """The problem of a row, named ``STEM-ID``; the row's number is its id where it has none.

        Raises RowError for a missing column, and for a value that is none of JSON's.
        """
        content, chat = row.fields(), ()
        texts, metadata = {"id": str(row.number), "answer": "", "solution": ""}, dict(content)
        for name in ("question", "answer", "solution", "id"):
            setting = getattr(self, name)
            column = setting or name
            value = metadata.pop(column, None) if column in content else _field(content, column)
            if column in content or value is not None:
                if name == "question" and isinstance(value, list | tuple):
                    chat = chat_of(value, column)
                    value = question_of(chat)
                texts[name] = text_of(value, column, may_be_number=name in ("answer", "id"))
            elif setting is not None or name == "question":
                names = [str(one) for one in content]
                near = f"{did_you_mean(column, names, cutoff=0.5)} (its columns: {', '.join(names) or 'none'})"
                named_by = f" (data.columns.{name})" if setting is not None else ""
                raise RowError(f'has no column "{column}"{named_by}{near}{"" if named_by else f"; {NAME_COLUMNS}"}')
        kind = MATH if canonical_number(texts["answer"]) is None else NUMBER
        return Problem(
            f"{stem}-{texts['id']}", texts["question"], texts["solution"], texts["answer"], row.source, kind,
            plain_values(metadata), chat,
        )  # fmt: skip


def _field(content: Mapping[str, Any], path: str) -> Any:
    """The value of a field of a column; None where there is none."""
    for name in path.split("."):
        content = content.get(name) if isinstance(content, Mapping) else None
    return content
