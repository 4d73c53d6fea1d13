"""Problems that a user's function makes (``data.source``)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_edo.data.chat import chat_of
from nemo_edo.data.columns import Columns
from nemo_edo.data.problems import read_problems
from nemo_edo.data.rows import ProblemFileError, Row, RowError, plain_values, text_of
from nemo_edo.errors import UserError
from nemo_edo.types import Problem
from nemo_edo.utils.import_path import load_function, said

SPLITS = ("warmup", "train", "test")
"""warmup and train may be missing: the warm-up then learns from train."""


def load_source(path: str, arguments: Mapping[str, Any]):
    """The function of ``data.source``, which takes the arguments. Raises UserError otherwise."""
    function = load_function(path, "data.source")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"data.source_args do not fit data.source ({path}): {error}; it is {path}{inspect.signature(function)}"
        ) from error
    return function


def made_problems(path: str, arguments: Mapping[str, Any], columns: Columns) -> dict[str, list[Problem]]:
    """The splits that ``data.source`` returns: ``{"train": problems, "test": problems}``, where a problem is a
    ``Problem`` or a row with ``columns``. Without "train" nothing can be trained. "warmup", if there is one, has the
    problems whose solutions the warm-up learns.

    Raises UserError where the function fails, returns something else, or a problem is bad or occurs twice.
    """
    function = load_source(path, arguments)
    try:
        splits = function(**arguments)
    except UserError:
        raise
    except Exception as error:  # whatever a user's function raises is a user's error
        raise UserError(f"data.source ({path}) raised {said(error)}") from error
    if not isinstance(splits, Mapping) or "test" not in splits or not splits.keys() <= set(SPLITS):
        found = f"the splits {', '.join(map(str, splits))}" if isinstance(splits, Mapping) else type(splits).__name__
        raise UserError(f'data.source ({path}) returned {found}, expected {{"train": problems, "test": problems}}')
    made = {}
    for split, rows in splits.items():
        numbered = (Row(number, f"{path} {split} {number}", row) for number, row in enumerate(rows, start=1))
        name, expected = f"data.source ({path}) {split}", "expected problems"
        # The function's bad rows are its author's to correct: the first one is named.
        loaded = read_problems(name, numbered, lambda row, split=split: _problem(row, columns, split), "skip", expected)
        for bad in loaded.skipped:
            raise ProblemFileError(f"data.source: {bad.source}: {bad.reason}")
        made[split] = loaded.problems
    for split in SPLITS[:-1]:
        shared = {problem.id for problem in made.get(split, [])} & {problem.id for problem in made["test"]}
        if shared:
            raise UserError(f"data.source ({path}) gave {split} and test problems the same id, such as {min(shared)}")
    return made


def _problem(row: Row, columns: Columns, split: str) -> Problem:
    if isinstance(row.content, Problem):
        problem = row.content
        for name in ("id", "question", "solution", "answer"):
            text_of(getattr(problem, name), name, may_be_blank=name in ("solution", "answer"))
        chat = chat_of(problem.messages, "messages") if problem.messages else ()
        return replace(problem, metadata=plain_values(problem.metadata), messages=chat)
    if not isinstance(row.content, Mapping):
        raise RowError(f"is of type {type(row.content).__name__}, expected a Problem or a dict")
    return columns.problem(replace(row, content=dict(row.content)), split)
