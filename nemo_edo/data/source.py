"""Problems that a user's function makes (``data.source``)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nemo_edo.data.columns import Columns, plain_values
from nemo_edo.data.rows import ProblemFileError, RowError
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
    made = {name: _checked(path, name, rows, columns) for name, rows in splits.items()}
    for split in SPLITS[:-1]:
        shared = {problem.id for problem in made.get(split, [])} & {problem.id for problem in made["test"]}
        if shared:
            raise UserError(f"data.source ({path}) gave {split} and test problems the same id, such as {min(shared)}")
    return made


def _checked(path: str, split: str, rows: Iterable[Any], columns: Columns) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for number, row in enumerate(rows, start=1):
        source = f"{path} {split} {number}"
        try:
            problem = _problem(row, columns, split, number, source)
            if problem.id in problems:
                raise RowError(f"has the id {problem.id}, as {problems[problem.id].source} has; ids are unique")
        except RowError as error:
            raise ProblemFileError(f"data.source: {source}: {error}") from error
        problems[problem.id] = problem
    if not problems:
        raise ProblemFileError(f"data.source: {path} made no {split} problems")
    return list(problems.values())


def _problem(row: Any, columns: Columns, split: str, number: int, source: str) -> Problem:
    if isinstance(row, Problem):
        texts = (row.id, row.question, row.solution, row.answer)
        if not all(isinstance(text, str) for text in texts) or not row.question.strip():
            raise RowError("is a Problem whose id, question, solution and answer are not texts, or without a question")
        return replace(row, metadata=plain_values(row.metadata))
    if not isinstance(row, Mapping):
        raise RowError(f"is of type {type(row).__name__}, expected a Problem or a dict")
    return columns.problem(row, stem=split, number=number, source=source)
