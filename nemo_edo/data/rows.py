"""The rows of a data file, whatever its format: JSON lines, a JSON list, Parquet, a folder of either, a data set that
was saved to disk, or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ProblemFileError(UserError):
    """A problem file that cannot be used; the message names the file, the lines and the remedy."""


class RowError(ValueError):
    """What is wrong with one row, without its place."""


class RepeatedKeyError(RowError):
    """An object of the row has one key twice."""


@dataclass(frozen=True)
class Row:
    number: int
    """Number of the line or row, from 1."""
    source: str
    """``path:line``, ``path:row N`` or the row's own file."""
    content: dict[str, Any] | RowError


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a ``.jsonl``, ``.json`` or ``.parquet`` file, or those of all such files below a folder, in the
    order of their names, numbers by value. In a folder, a ``.json`` file that holds one object is one row (MATH). Also
    those of a folder that ``Dataset.save_to_disk`` wrote.

    Raises ProblemFileError where a file cannot be read, or has another ending.
    """
    if is_saved_dataset(path):
        yield from _saved_rows(path)
    elif path.is_dir():
        yield from _folder_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".json":
        yield from _json_rows(path)
    elif path.suffix == ".jsonl":
        for number, line in numbered_lines(path):
            yield Row(number, f"{path}:{number}", _parsed(line))
    else:
        expected = "expected .jsonl, .json, .parquet or a folder of them"
        raise ProblemFileError(f"{path}: is not a file of problems; {expected}")


def is_saved_dataset(path: Path) -> bool:
    """Whether it is a folder that the package ``datasets`` wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def hub_rows(name: str, configs: tuple[str, ...], split: str) -> Iterator[Row]:
    """The rows of a data set of the Hugging Face hub, its configs one after another.

    Raises ProblemFileError where the hub cannot be reached or has no such data set.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    number = 0
    for config in configs:
        try:
            dataset = load_dataset(name, config, split=split)
        except (DatasetNotFoundError, OSError, ValueError) as error:
            raise ProblemFileError(
                f"{name}: {config} ({split}) cannot be loaded from the hub ({error}); give the file itself"
            ) from error
        for row in dataset:
            number += 1
            yield Row(number, f"{name}:{config}/{split}:{number}", row)


def numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """Line numbers from 1 and contents, blank lines left out. Split at ``\\n`` only, as JSONL has it."""
    lines = read_bytes(path).removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ProblemFileError(f"{path}: cannot be read ({error.strerror}); expected a file of problems") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises RepeatedKeyError for a key that an object has twice: JSON readers silently take the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKeyError(f'has the key "{repeated}" twice; keep one of the two')
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""Made once: ``json.loads`` with a hook makes one for each row, which takes as long as the row."""
_LAST_WINS = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def parse_json(text: bytes, expected: str, decode: Callable[[str], Any] = _DECODER.decode) -> Any:
    """The JSON value; ``expected`` ends the messages. Raises RowError, with ``_DECODER`` for repeated keys as well."""
    try:
        return decode(text.decode("utf-8"))
    except RepeatedKeyError:
        raise
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise RowError(f"is not valid JSON ({error.msg} at column {error.colno}); {expected}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        raise RowError(f"is not valid JSON ({error}); {expected}") from error


def _elements(text: str) -> list[Any]:
    """Those of a list, one by one: a RepeatedKeyError in place of one that has a key twice."""
    found, place = [], _SPACE.match(text, text.index("[") + 1).end()
    while True:
        try:
            element, end = _DECODER.raw_decode(text, place)
        except RepeatedKeyError as error:
            element, end = error, _LAST_WINS.raw_decode(text, place)[1]
        found.append(element)
        end = _SPACE.match(text, end).end()
        if text[end:].rstrip() == "]":
            return found
        if text[end : end + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        place = _SPACE.match(text, end + 1).end()


def _parsed(text: bytes) -> dict[str, Any] | RowError:
    try:
        row = parse_json(text, "expected a JSON object")
    except RowError as error:
        return error
    return _object_or_error(row)


def _object_or_error(row: Any) -> dict[str, Any] | RowError:
    return row if isinstance(row, dict | RowError) else RowError("is not a JSON object")


def _json_rows(path: Path) -> Iterator[Row]:
    """The rows of a list of objects, or of one object per line under another ending."""
    content = read_bytes(path).removeprefix(_BYTE_ORDER_MARK)
    if not content.lstrip().startswith(b"["):
        for number, line in numbered_lines(path):
            yield Row(number, f"{path}:{number}", _parsed(line))
        return
    try:
        rows = _list_rows(content)
    except RowError as error:
        raise ProblemFileError(f"{path}: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield Row(number, f"{path}:row {number}", _object_or_error(row))


def _list_rows(content: bytes) -> list[Any]:
    expected = "expected a list of objects"
    try:
        return parse_json(content, expected)
    except RepeatedKeyError:  # which says not in which row
        return parse_json(content, expected, _elements)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        images = [name for name in table.column_names if name.startswith("image")]
        rows = table.drop_columns(images).to_pylist()
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path}: is not a readable Parquet file ({error}); download it again") from error
    for number, row in enumerate(rows, start=1):
        yield Row(number, f"{path}:row {number}", row)


def _saved_rows(folder: Path) -> Iterator[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise ProblemFileError(f"{folder}: is not a readable data set ({error}); save it again") from error
    if isinstance(dataset, DatasetDict):
        splits = ", ".join(dataset)
        raise ProblemFileError(f"{folder}: has the splits {splits}; name one, such as {folder / next(iter(dataset))}")
    for number, row in enumerate(dataset.with_format(None), start=1):
        yield Row(number, f"{folder}:row {number}", row)


def _folder_rows(folder: Path) -> Iterator[Row]:
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".parquet")]
    if not files:
        raise ProblemFileError(f"{folder}: has no .json, .jsonl or .parquet file")
    number = 0
    for path in sorted(files, key=_by_number):
        single = path.suffix == ".json" and read_bytes(path).lstrip(_BYTE_ORDER_MARK).lstrip().startswith(b"{")
        rows = [Row(1, str(path), _parsed(read_bytes(path)))] if single else read_rows(path)
        for row in rows:
            number += 1
            yield Row(number, row.source, row.content)


def _by_number(path: Path) -> tuple[str, int, str]:
    return str(path.parent), int(path.stem) if path.stem.isdecimal() else -1, path.name
