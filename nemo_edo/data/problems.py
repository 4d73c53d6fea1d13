"""Problems from files (GSM8K's JSONL format, a benchmark's official files, columns of any names, or what
``write_problems`` wrote) and from a user's function (``data.source``)."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.data.answers import canonical_number
from nemo_edo.data.benchmarks import BENCHMARKS, MATH, NUMBER, TEXT, Benchmark
from nemo_edo.data.chat import chat_of, question_of
from nemo_edo.data.rows import NAME_COLUMNS, ProblemFileError, Row, RowError, plain_values, read_rows, text_of
from nemo_edo.errors import UserError
from nemo_edo.types import Problem
from nemo_edo.utils.import_path import load_function, said
from nemo_edo.utils.wording import did_you_mean

if TYPE_CHECKING:
    from nemo_edo.config import Columns, DataConfig

_SHOWN = 5
_PREPARED_FIELDS = ("id", "question", "solution", "answer", "answer_kind")
_MAY_BE_BLANK = ("solution", "answer")
_OF_SOURCES = ("source", "metadata", "messages")
_WRITTEN_CHAT = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content|type|name)['\"]\s*:")  # as JSON or Python writes it
MADE = "data.source"  # the benchmark of problems that a function has made
SPLITS = ("warmup", "train", "test")  # what a function makes; without warmup, the warm-up learns from train


def field_of(content: Mapping[str, Any], column: str) -> Any:
    """A column's value, or that of a field of a column: reward_model.ground_truth. None where there is none."""
    if column in content:
        return content[column]
    for part in column.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def named_problem(columns: Columns, row: Row, stem: str) -> Problem:
    """The problem of a row, named ``STEM-ID``; the row's number is its id where it has none. Raises RowError for a
    missing column, and for a value that is none of JSON's."""
    content, chat = row.fields(), ()
    texts, metadata = {"id": str(row.number), "answer": "", "solution": ""}, dict(content)
    named = {getattr(columns, name) for name in texts} | {columns.question}
    for name in ("question", "answer", "solution", "id"):
        setting = getattr(columns, name)
        column = setting or name
        value = field_of(content, column)
        is_empty = name == "id" and value in (None, "")
        is_empty |= name == "solution" and not (isinstance(value, str) and value.strip())
        if setting is None and (name in named or is_empty):
            continue  # another's column, or nothing
        if name == "question" or (name != "id" and isinstance(value, str | None)):
            metadata.pop(column, None)  # another answer or solution stays as it is, for users' rewards
        if column in content or value is not None:
            if name == "question" and isinstance(value, list | tuple):
                chat = chat_of(value, column)
                value = question_of(chat)
            elif name == "question" and _WRITTEN_CHAT.match(str(value)):
                raise RowError(f'"{column}" is messages written as a text; expected the list itself (json.loads)')
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


@dataclass(frozen=True)
class LoadedProblems:
    problems: list[Problem]
    skipped: list[str]  # of each bad row ``PATH:LINE: WHY``: what is wrong, and what would be right


def load_problems(path: str | Path, data: DataConfig, split: str = "train") -> LoadedProblems:
    """The problems of a split's file, in its order.

    A file with a manifest next to it is what ``write_problems`` wrote, and has to be what the manifest says. Otherwise
    it has rows with ``data.columns``; or where none is named those of the benchmark's official files, or without one
    GSM8K's, where questions that differ only in white space are bad rows, but for the first. Solutions lose GSM8K's
    calculator annotations; nothing else of the text is changed. The other columns are the problem's metadata.
    Raises ProblemFileError (a ValueError) for what cannot be read, bad rows, no good ones, and another benchmark's.
    """
    path, on_bad_rows = Path(path), data.on_bad_rows
    benchmark = data.tested_on if split == "test" else data.benchmark
    if manifest_path(path).is_file():
        return _load_prepared(path, benchmark)
    rows = read_rows(path)
    if any(name is not None for name in vars(data.columns).values()):
        expected = "expected one problem in each row"
        return read_problems(path, rows, lambda row: named_problem(data.columns, row, path.stem), on_bad_rows, expected)
    if benchmark is not None:
        reading = {"split": split, "on_bad_rows": on_bad_rows, "check_rows": data.check_rows}
        return read_benchmark(BENCHMARKS[benchmark], path, rows, **reading)
    first_seen: dict[str, str] = {}

    def gsm8k_problem(row: Row) -> Problem:
        problem = BENCHMARKS["gsm8k"].problem(row, path.stem)
        first = first_seen.setdefault(" ".join(problem.question.split()), row.source)
        if first != row.source:
            raise RowError(f'"question" is the same as in {first}, expected each question once')
        return problem

    expected = 'expected {"question": "...", "answer": "... #### 72"} on each line'
    return read_problems(path, rows, gsm8k_problem, on_bad_rows, expected)


def read_benchmark(
    benchmark: Benchmark, path: Path, rows: Iterable[Row], *, split: str, on_bad_rows: str, check_rows: bool
) -> LoadedProblems:
    """The problems of a benchmark's official rows; ``path`` names them. Raises as ``load_problems`` does."""
    stem = path.stem if path.suffix else f"{path.parent.name}-{path.name}".lstrip("-")
    rows = list(rows)
    loaded = read_problems(
        path, rows, lambda row: benchmark.problem(row, stem), on_bad_rows, f"expected {benchmark.expected}"
    )
    split = split if split in benchmark.splits else next(iter(benchmark.splits))  # the only one
    if len(rows) != benchmark.splits[split]:
        other = (
            f"{path}: has {len(rows)} rows, but {benchmark.title}'s {split} split has {benchmark.splits[split]} "
            f"({benchmark.hub}): it is of another version, or a part"
        )
        if check_rows:
            raise ProblemFileError(f"{other} (data.check_rows=false takes it as it is)")
        warnings.warn(f"{other}; results are not comparable with those on the whole split", stacklevel=2)
    return loaded


def read_problems(
    name: str | Path, rows: Iterable[Row], problem: Callable[[Row], Problem], on_bad_rows: str, expected: str
) -> LoadedProblems:
    """The problems that ``problem`` makes of rows; it raises RowError for a bad one. name: what the rows are of.
    Raises ProblemFileError as ``load_problems`` does."""
    problems: dict[str, Problem] = {}
    bad: list[str] = []
    for row in rows:
        try:
            made = problem(row)
            if made.id in problems:
                raise RowError(f"has the id {made.id}, as {problems[made.id].source} has; ids are unique in a file")
            problems[made.id] = made
        except RowError as error:
            bad.append(f"{row.source}: {error}")
    if not problems and not bad:
        raise ProblemFileError(f"{name}: has no rows; {expected}")
    return without_bad_rows(name, list(problems.values()), bad, on_bad_rows, expected=f"; {expected}")


def without_bad_rows(
    name: str | Path, good: list[Problem], bad: list[str], on_bad_rows: str, expected: str = ""
) -> LoadedProblems:
    """Raises ProblemFileError where bad rows are an error, or no good one is left."""
    if bad and (on_bad_rows == "error" or not good):
        shown = [f"  {row}" for row in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            shown.append(f"  ... and {len(bad) - _SHOWN} more")
        remedy = "correct them, or leave them out with --on-bad-rows=skip" if good else f"no good row is left{expected}"
        message = f"{name}: bad rows: {len(bad)} of {len(bad) + len(good)}; {remedy}"
        raise ProblemFileError("\n".join([message, *shown]))
    return LoadedProblems(good, bad)


def without_unusable(
    path: Path, loaded: LoadedProblems, on_bad_rows: str, why: Callable[[Problem], str | None]
) -> LoadedProblems:
    """A file's problems without those that ``why`` calls unusable: they are bad rows (``without_bad_rows``)."""
    reasons = [(problem, why(problem)) for problem in loaded.problems]
    good = [problem for problem, reason in reasons if reason is None]
    bad = [f"{problem.source}: {reason}" for problem, reason in reasons if reason is not None]
    return LoadedProblems(without_bad_rows(path, good, bad, on_bad_rows).problems, [*loaded.skipped, *bad])


def write_problems(
    path: Path, problems: Sequence[Problem], *, benchmark: str, split: str, source: dict[str, str], skipped: int
) -> dict[str, Any]:
    """Writes problems as JSON lines, and a manifest, which it returns. source: where they are from, with a checksum."""
    names = (*_PREPARED_FIELDS, *(_OF_SOURCES if benchmark == MADE else ()))
    rows = [{name: getattr(problem, name) for name in names} for problem in problems]
    for row, problem in zip(rows, problems, strict=True):
        if problem.metadata:
            row["metadata"] = dict(problem.metadata)
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
    return path.with_name(path.name + ".manifest.json")


def normal_question(question: str) -> str:
    """Equal for questions that differ only in white space and case."""
    return " ".join(question.casefold().split())


def _load_prepared(path: Path, benchmark: str | None) -> LoadedProblems:
    """What ``write_problems`` wrote, if nothing has touched it since."""
    manifest_file = manifest_path(path)
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
        named, sha256 = manifest["benchmark"], manifest["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ProblemFileError(f"{manifest_file}: is not a manifest ({error}); run tools/prepare_data again") from error
    rows = list(read_rows(path))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ProblemFileError(
            f"{path}: has the SHA-256 checksum {found}, but {manifest_file.name} says {sha256}; the file has changed "
            "since tools/prepare_data wrote it: write it again"
        )
    if benchmark is not None and named != benchmark:
        raise ProblemFileError(f"{path}: has problems of {named}, but the config says {benchmark}")

    def problem(row: Row) -> Problem:
        content = row.fields()
        values = {
            name: text_of(content.get(name), name, may_be_blank=name in _MAY_BE_BLANK) for name in _PREPARED_FIELDS
        }
        if values["answer_kind"] not in (NUMBER, MATH, TEXT):
            raise RowError(f'"answer_kind" is {values["answer_kind"]!r}, expected {NUMBER}, {MATH} or {TEXT}')
        of_source = {name: content[name] for name in _OF_SOURCES if name in content}
        problem = Problem(**{"source": row.source, **values, **of_source})
        return replace(problem, messages=tuple(problem.messages))

    return read_problems(path, rows, problem, "error", "expected rows of tools/prepare_data")


# --- problems that a user's function makes ----------------------------------------------------------------------------


def load_source(path: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
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
    problems whose solutions the warm-up learns. Raises UserError where the function fails or returns another value, and
    for a problem that is bad or occurs twice."""
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

    def problem(row: Row) -> Problem:
        made = row.content
        if not isinstance(made, Problem):
            if not isinstance(made, Mapping):
                raise RowError(f"is of type {type(made).__name__}, expected a Problem or a dict")
            return named_problem(columns, replace(row, content=dict(made)), split)
        for name in ("id", "question", "solution", "answer"):
            text_of(getattr(made, name), name, may_be_blank=name in _MAY_BE_BLANK)
        chat = chat_of(made.messages, "messages") if made.messages else ()
        return replace(made, metadata=plain_values(made.metadata), messages=chat)

    made_splits = {}
    for split, rows in splits.items():
        numbered = (Row(number, f"{path} {split} {number}", row) for number, row in enumerate(rows, start=1))
        # The function's bad rows are its author's to correct: the first one is named.
        loaded = read_problems(f"data.source ({path}) {split}", numbered, problem, "skip", "expected problems")
        for bad in loaded.skipped:
            raise ProblemFileError(f"data.source: {bad}")
        made_splits[split] = loaded.problems
    for split in SPLITS[:-1]:
        shared = {one.id for one in made_splits.get(split, [])} & {one.id for one in made_splits["test"]}
        if shared:
            raise UserError(f"data.source ({path}) gave {split} and test problems the same id, such as {min(shared)}")
    return made_splits
