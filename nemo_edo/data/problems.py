"""Problem files in GSM8K's JSONL format: ``{"question": ..., "answer": "... #### 72"}``, one object a line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.data.answers import final_answer, is_well_formed
from nemo_edo.errors import UserError
from nemo_edo.types import Problem

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN = 5
_EXPECTED_ROW = 'expected {"question": "...", "answer": "... #### 72"}'


class ProblemFileError(UserError):
    """A problem file that cannot be used; the message names the file, the lines and the remedy."""


@dataclass(frozen=True)
class BadRow:
    source: str
    """``path:line``."""
    reason: str
    """What is wrong, and what would be right."""


@dataclass(frozen=True)
class LoadedProblems:
    problems: list[Problem]
    skipped: list[BadRow]


def load_problems(path: str | Path, *, on_bad_rows: str) -> LoadedProblems:
    """The problems of a GSM8K JSONL file, in its order.

    Solutions lose GSM8K's calculator annotations (``48/2=<<48/2=24>>24`` becomes ``48/2=24``), as is usual where no
    calculator is called; nothing else of the text is changed. Blank lines and a UTF-8 byte order mark are passed over.

    ``on_bad_rows``: ``"error"`` stops at a file with bad rows, ``"skip"`` leaves them out and returns them in
    ``skipped``. Questions that differ only in white space count as duplicates: all but the first are bad rows.

    Raises ProblemFileError (a ValueError): the file cannot be read, holds no rows, has bad rows (``"error"``), or
    nothing but bad rows.
    """
    if on_bad_rows not in ("error", "skip"):
        raise ValueError(f"on_bad_rows is {on_bad_rows!r}, expected error or skip")
    path = Path(path)
    problems: list[Problem] = []
    bad: list[BadRow] = []
    first_seen: dict[str, int] = {}
    for number, line in _numbered_lines(path):
        source = f"{path}:{number}"
        try:
            question, solution = _parse_row(line)
            _require_new(question, number, first_seen)
        except _RowError as error:
            bad.append(BadRow(source, str(error)))
            continue
        answer = final_answer(solution)
        problems.append(Problem(f"{path.stem}-{number}", question, solution, answer, source))
    if not problems and not bad:
        raise ProblemFileError(f"{path}: has no rows; {_EXPECTED_ROW} on each line")
    if bad and (on_bad_rows == "error" or not problems):
        raise ProblemFileError(_report(path, bad, num_good=len(problems)))
    return LoadedProblems(problems, bad)


class _RowError(ValueError):
    """What is wrong with one row, without its place."""


def _numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """Line numbers from 1 and contents, blank lines left out. Split at ``\\n`` only, as JSONL has it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProblemFileError(f"{path}: cannot be read ({error.strerror}); expected a JSONL file") from error
    lines = content.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_row(line: bytes) -> tuple[str, str]:
    """Question and solution (annotations removed) of one line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _RowError(f"is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise _RowError(f"is not valid JSON ({error.msg} at column {error.colno}); {_EXPECTED_ROW}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        raise _RowError(f"is not valid JSON ({error}); {_EXPECTED_ROW}") from error
    if not isinstance(row, dict):
        raise _RowError(f"is not a JSON object; {_EXPECTED_ROW}")
    question, solution = (_text_field(row, name) for name in ("question", "answer"))
    solution = _ANNOTATION.sub("", solution)
    if not is_well_formed(solution):
        raise _RowError('"answer" does not end in one "#### number" line, as in "... #### 72"')
    return question, solution


def _text_field(row: dict[str, object], name: str) -> str:
    if name not in row:
        raise _RowError(f'has no "{name}" (its keys: {", ".join(row) or "none"}); {_EXPECTED_ROW}')
    value = row[name]
    if not isinstance(value, str):
        raise _RowError(f'"{name}" is of type {type(value).__name__}, expected a text')
    if not value.strip():
        raise _RowError(f'"{name}" is blank, expected a text')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _RowError(f'"{name}" holds half of a surrogate pair (\\ud800 to \\udfff), which no tokenizer can encode')
    return value


def _require_new(question: str, number: int, first_seen: dict[str, int]) -> None:
    first = first_seen.setdefault(" ".join(question.split()), number)
    if first != number:
        raise _RowError(f'"question" is the same as on line {first}, expected each question once')


def _report(path: Path, bad: list[BadRow], *, num_good: int) -> str:
    shown = [f"  {row.source}: {row.reason}" for row in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        shown.append(f"  ... and {len(bad) - _SHOWN} more")
    remedy = "correct them, or leave them out with --on-bad-rows=skip" if num_good else "no good row is left"
    return "\n".join([f"{path}: bad rows: {len(bad)} of {len(bad) + num_good}; {remedy}", *shown])
