"""Problems from files: GSM8K's JSONL format, a benchmark's official files, or what ``tools/prepare_data`` wrote."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.data.benchmarks import BENCHMARKS, MATH, NUMBER, TEXT, Benchmark, gsm8k_solution
from nemo_edo.data.columns import Columns
from nemo_edo.data.rows import (
    ProblemFileError,
    Row,
    RowError,
    numbered_lines,
    parse_json,
    read_bytes,
    read_rows,
)
from nemo_edo.types import Problem

__all__ = ["BadRow", "LoadedProblems", "ProblemFileError", "load_problems", "read_benchmark", "write_problems"]

_SHOWN = 5
_EXPECTED_ROW = 'expected {"question": "...", "answer": "... #### 72"}'
_PREPARED_FIELDS = ("id", "question", "solution", "answer", "answer_kind")
_MAY_BE_EMPTY = ("solution", "answer")
_OF_SOURCES = ("source", "metadata")
MADE = "data.source"
"""The benchmark of problems that a function has made."""
MANIFEST_SUFFIX = ".manifest.json"


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


def load_problems(
    path: str | Path,
    *,
    on_bad_rows: str,
    benchmark: str | None = None,
    split: str = "train",
    check_rows: bool = True,
    columns: Columns | None = None,
) -> LoadedProblems:
    """The problems of a file, in its order.

    A file with a manifest next to it is what ``tools/prepare_data`` wrote: its checksum, its rows and, if given, the
    benchmark have to be the manifest's. Otherwise ``benchmark`` names whose official file (or folder) it is, and
    ``check_rows`` has it hold as many rows as the official ``split``.
    None: rows with the named ``columns``, as they are; or where none is named GSM8K's format, with any number of rows.
    Solutions lose GSM8K's calculator annotations; nothing else of the text is changed. Blank lines and a UTF-8 byte
    order mark are passed over, and GSM8K's questions that differ only in white space count as duplicates: all but the
    first are bad rows. (Official files of benchmarks may repeat some.) The other columns are the problem's metadata.

    ``on_bad_rows``: ``"error"`` stops at a file with bad rows, ``"skip"`` leaves them out and returns them in
    ``skipped``.

    Raises ProblemFileError (a ValueError): the file cannot be read, has no rows, has bad rows (``"error"``), or
    nothing but bad rows; it is another benchmark's, or of another version; it is not what its manifest says.
    """
    if on_bad_rows not in ("error", "skip"):
        raise ValueError(f"on_bad_rows is {on_bad_rows!r}, expected error or skip")
    path = Path(path)
    if manifest_path(path).is_file():
        return _load_prepared(path, benchmark)
    if columns is not None and columns.are_named:
        return _load_columns(path, columns, on_bad_rows)
    if benchmark is None:
        return _load_gsm8k(path, on_bad_rows)
    official = BENCHMARKS[benchmark]
    return read_benchmark(official, path, read_rows(path), split=split, on_bad_rows=on_bad_rows, check_rows=check_rows)


def read_benchmark(
    benchmark: Benchmark, path: Path, rows: Iterable[Row], *, split: str, on_bad_rows: str, check_rows: bool
) -> LoadedProblems:
    """The problems of a benchmark's official rows; ``path`` names them. Raises as ``load_problems`` does."""
    stem = path.stem if path.suffix else f"{path.parent.name}-{path.name}".lstrip("-")

    def problem(row: Row) -> Problem:
        gold = benchmark.gold(row)
        return Problem(f"{stem}-{row.number}", gold.question, gold.solution, gold.answer, row.source, gold.kind)

    problems, bad = _collect(rows, problem)
    found = len(problems) + len(bad)
    split = benchmark.split_of(split)
    # A file with none of the columns is another one altogether: its rows say more than their number.
    if check_rows and problems and found != benchmark.splits[split]:
        raise ProblemFileError(
            f"{path}: has {found} rows, but {benchmark.title}'s {split} split has {benchmark.splits[split]} "
            f"({benchmark.hub}): it is of another version, or a part (data.check_rows=false takes it as it is)"
        )
    return _checked(path, problems, bad, on_bad_rows, expected=f"expected {benchmark.expected}")


def write_problems(
    path: Path, problems: Sequence[Problem], *, benchmark: str, split: str, source: dict[str, str], skipped: int
) -> dict[str, Any]:
    """Writes problems as JSON lines, and next to them the manifest, which is returned.

    ``source``: what they were read from, and its checksum.
    """
    names = (*_PREPARED_FIELDS, *(_OF_SOURCES if benchmark == MADE else ()))
    rows = [{name: getattr(problem, name) for name in names} for problem in problems]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    manifest = {
        "benchmark": benchmark,
        "split": split,
        "rows": len(rows),
        "skipped": skipped,
        "answer_kinds": dict(sorted(Counter(problem.answer_kind for problem in problems).items())),
        "distinct_questions": len({normal_question(problem.question) for problem in problems}),
        "sha256": hashlib.sha256(content).hexdigest(),
        "source": source,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    manifest_path(path).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST_SUFFIX)


def normal_question(question: str) -> str:
    """Equal for questions that differ only in white space and case."""
    return " ".join(question.casefold().split())


def _load_gsm8k(path: Path, on_bad_rows: str) -> LoadedProblems:
    first_seen: dict[str, str] = {}

    def problem(row: Row) -> Problem:
        content = _content(row)
        question = _text_field(content, "question")
        solution, answer = gsm8k_solution(_text_field(content, "answer"))
        _require_new(question, row.source, first_seen)
        metadata = {name: value for name, value in content.items() if name not in ("question", "answer")}
        return Problem(f"{path.stem}-{row.number}", question, solution, answer, row.source, metadata=metadata)

    is_of_lines = path.suffix != ".parquet" and not path.is_dir()
    problems, bad = _collect(_gsm8k_lines(path) if is_of_lines else read_rows(path), problem)
    return _checked(path, problems, bad, on_bad_rows, expected=f"{_EXPECTED_ROW} on each line")


def _gsm8k_lines(path: Path) -> Iterator[Row]:
    for number, text in numbered_lines(path):
        try:
            yield Row(number, f"{path}:{number}", _parse_row(text))
        except RowError as error:
            yield Row(number, f"{path}:{number}", error)


def _load_columns(path: Path, columns: Columns, on_bad_rows: str) -> LoadedProblems:
    ids: dict[str, str] = {}

    def problem(row: Row) -> Problem:
        made = columns.problem(_content(row), stem=path.stem, number=row.number, source=row.source)
        if ids.setdefault(made.id, row.source) != row.source:
            raise RowError(f"has the id {made.id}, as {ids[made.id]} has; ids are unique in a file")
        return made

    problems, bad = _collect(read_rows(path), problem)
    return _checked(path, problems, bad, on_bad_rows, expected="expected one problem in each row")


def _content(row: Row) -> dict[str, Any]:
    if isinstance(row.content, RowError):
        raise row.content
    return row.content


def _load_prepared(path: Path, benchmark: str | None) -> LoadedProblems:
    """What ``write_problems`` wrote, if nothing has touched it since."""
    manifest_file = manifest_path(path)
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        named, rows, sha256 = (manifest[name] for name in ("benchmark", "rows", "sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise ProblemFileError(f"{manifest_file}: is not a manifest ({error}); run tools/prepare_data again") from error
    content = read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ProblemFileError(
            f"{path}: has the SHA-256 checksum {found}, but {manifest_file.name} says {sha256}; the file has changed "
            "since tools/prepare_data wrote it: write it again"
        )
    if benchmark is not None and named != benchmark:
        raise ProblemFileError(f"{path}: has problems of {named}, but the config says {benchmark}")

    def problem(line: tuple[int, bytes]) -> Problem:
        number, text = line
        row = _parse_row(text)
        values = {name: _text_field(row, name, may_be_empty=name in _MAY_BE_EMPTY) for name in _PREPARED_FIELDS}
        if values["answer_kind"] not in (NUMBER, MATH, TEXT):
            raise RowError(f'"answer_kind" is {values["answer_kind"]!r}, expected {NUMBER}, {MATH} or {TEXT}')
        of_source = {name: row[name] for name in _OF_SOURCES if name in row}
        return Problem(**{"source": f"{path}:{number}", **values, **of_source})

    problems, bad = _collect(numbered_lines(path), problem, source=lambda line: f"{path}:{line[0]}")
    if len(problems) + len(bad) != rows:
        raise ProblemFileError(f"{path}: has {len(problems)} rows, but {manifest_file.name} says {rows}")
    return _checked(path, problems, bad, "error", expected="expected rows of tools/prepare_data")


def _collect(
    rows: Iterable[Any], problem: Callable[[Any], Problem], source: Callable[[Any], str] = lambda row: row.source
) -> tuple[list[Problem], list[BadRow]]:
    problems: list[Problem] = []
    bad: list[BadRow] = []
    for row in rows:
        try:
            problems.append(problem(row))
        except RowError as error:
            bad.append(BadRow(source(row), str(error)))
    return problems, bad


def _checked(
    path: Path, problems: list[Problem], bad: list[BadRow], on_bad_rows: str, *, expected: str
) -> LoadedProblems:
    if not problems and not bad:
        raise ProblemFileError(f"{path}: has no rows; {expected}")
    if bad and (on_bad_rows == "error" or not problems):
        raise ProblemFileError(report_bad_rows(path, bad, num_good=len(problems)))
    return LoadedProblems(problems, bad)


def _parse_row(line: bytes) -> dict[str, object]:
    row = parse_json(line, _EXPECTED_ROW)
    if not isinstance(row, dict):
        raise RowError(f"is not a JSON object; {_EXPECTED_ROW}")
    return row


def _text_field(row: dict[str, object], name: str, *, may_be_empty: bool = False) -> str:
    if name not in row:
        raise RowError(f'has no "{name}" (its keys: {", ".join(row) or "none"}); {_EXPECTED_ROW}')
    value = row[name]
    if not isinstance(value, str):
        raise RowError(f'"{name}" is of type {type(value).__name__}, expected a text')
    if not value.strip() and not may_be_empty:
        raise RowError(f'"{name}" is blank, expected a text')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RowError(f'"{name}" holds half of a surrogate pair (\\ud800 to \\udfff), which no tokenizer can encode')
    return value


def _require_new(question: str, source: str, first_seen: dict[str, str]) -> None:
    first = first_seen.setdefault(" ".join(question.split()), source)
    if first != source:
        raise RowError(f'"question" is the same as in {first}, expected each question once')


def report_bad_rows(path: Path, bad: list[BadRow], *, num_good: int) -> str:
    shown = [f"  {row.source}: {row.reason}" for row in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        shown.append(f"  ... and {len(bad) - _SHOWN} more")
    remedy = "correct them, or leave them out with --on-bad-rows=skip" if num_good else "no good row is left"
    return "\n".join([f"{path}: bad rows: {len(bad)} of {len(bad) + num_good}; {remedy}", *shown])
