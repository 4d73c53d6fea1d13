"""The rows of a data file: JSON lines, a JSON list, Parquet, a folder of either, or a data set saved to disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from nemo_edo.errors import UserError
from nemo_edo.utils.wording import shown

if TYPE_CHECKING:
    import pyarrow

_OF_A_SPLIT = re.compile(r"(?:.*?[_-])?(train|test|val|valid|validation|dev|eval)(?:[_-].*)?")  # test_prefs
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json"}  # JSON files that the hub's data sets have next to their rows
NAME_COLUMNS = "other columns are named with data.columns.question=NAME and data.columns.answer=NAME"


class ProblemFileError(UserError):
    """A problem file that cannot be used; the message names the file, the lines and the remedy."""


class RowError(ValueError):
    """What is wrong with one row, without its place."""


@dataclass(frozen=True)
class Row:
    number: int  # number of the line or row, from 1
    source: str  # ``path:line``, ``path:row N`` or the row's own file
    content: Any  # the value that was read, or a RowError

    def fields(self) -> dict[str, Any]:
        """Raises RowError for a row that could not be read or is no object."""
        if isinstance(self.content, RowError):
            raise self.content
        if not isinstance(self.content, dict):
            raise RowError("is not a JSON object")
        return self.content


def text_of(value: Any, name: str, *, may_be_number: bool = False, may_be_blank: bool = False) -> str:
    """A row's value as a text. Raises RowError for a value of another type, a blank one, and half a surrogate pair."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # what pandas makes of whole numbers with a gap between them
    is_number = may_be_number and isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, str) and not is_number:
        expected = "a text or a whole number" if may_be_number else "a text"
        raise RowError(f'"{name}" is {"null" if value is None else shown(value)}, expected {expected}')
    text = str(value)
    if not text.strip() and not may_be_blank:
        raise RowError(f'"{name}" is blank, expected a text')
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RowError(f'"{name}" holds half of a surrogate pair (\\ud800 to \\udfff), which no tokenizer can encode')
    return text


def plain_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON; times and decimals are texts, bytes are null. Raises RowError for another value."""
    values = {}
    for name, value in metadata.items():
        try:
            values[name] = json.loads(json.dumps(value, default=_as_json))
        except (TypeError, ValueError) as error:
            raise RowError(
                f'column "{name}" is {shown(value)}, which is not a text, a number, true, false, null, or a list or '
                "mapping of them; convert the column, or leave it out"
            ) from error
    return values


def _as_json(value: Any) -> str | None:
    if isinstance(value, bytes):
        return None
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    raise TypeError


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a ``.json``, ``.parquet`` or JSON-lines file, or those of all such files below a folder, in the order
    of their names, numbers by value, without hidden ones (.ipynb_checkpoints). In a folder, a ``.json`` file that holds
    one object is one row (MATH). Or what ``Dataset.save_to_disk`` wrote. Raises ProblemFileError for a bad file."""
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _numbered(path, _saved_rows(path))
    elif path.is_dir():
        files = [
            file for file in path.rglob("*")
            if file.suffix in (".json", ".jsonl", ".parquet") and file.name not in _NOT_ROWS and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]  # fmt: skip
        if not files:
            raise ProblemFileError(f"{path}: has no .json, .jsonl or .parquet file")
        splits = sorted({split for file in files if (split := _split(file.relative_to(path)))})
        if len(splits) > 1:
            raise ProblemFileError(f"{path}: has files of the splits {' and '.join(splits)}; name those of one")
        number = 0
        for file in sorted(
            files, key=lambda file: (str(file.parent), int(file.stem) if file.stem.isdecimal() else -1, file.name)
        ):
            content = _content(file).strip() if file.suffix == ".json" else b""
            one = _parsed(content) if content.startswith(b"{") else None
            lines = content.split(b"\n") if isinstance(one, RowError) else []
            is_one = lines[:1] and lines[0].strip() == b"{"  # one object over several lines, with a mistake
            is_lines = not is_one and any(isinstance(_parsed(line), dict) for line in lines)
            for row in read_rows(file) if one is None or is_lines else [Row(1, str(file), one)]:
                number += 1
                yield Row(number, row.source, row.content)
    elif path.suffix == ".parquet":
        yield from _numbered(path, _parquet_rows(path))
    elif path.suffix == ".json" and _content(path).lstrip().startswith(b"["):
        rows = _parsed(_content(path))
        if isinstance(rows, RowError):
            raise ProblemFileError(f"{path}: {rows}; expected a list of objects") from rows
        yield from _numbered(path, rows)
    else:
        for number, line in enumerate(_content(path).split(b"\n"), start=1):  # not at Unicode's other line separators
            if line.strip():
                yield Row(number, f"{path}:{number}", _parsed(line))


def _split(file: Path) -> str | None:
    """The split that a file of a folder names, or else the nearest folder around it."""
    found = map(_OF_A_SPLIT.fullmatch, (file.stem, *(folder.stem for folder in list(file.parents)[:-1])))
    split = next((match[1] for match in found if match), None)
    return "validation" if split in ("val", "valid") else split


def _content(path: Path) -> bytes:
    """The file's content without a byte-order mark. Raises ProblemFileError where it cannot be read."""
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ProblemFileError(f"{path}: cannot be read ({error.strerror}); expected a file of problems") from error


def _numbered(path: Path, rows: Iterable[Any]) -> Iterator[Row]:
    return (Row(number, f"{path}:row {number}", row) for number, row in enumerate(rows, start=1))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | RowError:
    """An object; or the RowError of a key that it, or an object in it, has twice: JSON readers take the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        return RowError(f'has the key "{repeated}" twice; keep one of the two')
    return _error_in(list(made.values())) or made


def _error_in(value: Any) -> RowError | None:
    if isinstance(value, list):
        return next(filter(None, map(_error_in, value)), None)
    return value if isinstance(value, RowError) else None


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # made once: ``json.loads`` makes one for each row


def _parsed(text: bytes) -> Any:
    """The JSON value, or a RowError in place of a bad one."""
    try:
        return _DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError(f"is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8")
    except json.JSONDecodeError as error:
        return RowError(f"is not valid JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        return RowError(f"is not valid JSON ({error})")


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        named = [column for column in table.schema if column.name.startswith("image")]
        images = [column.name for column in named if _may_hold_images(column.name, column.type)]
        told = {name: table.column(name).to_pylist() for name in images}
        table = table.drop_columns(images)
        for place, column in enumerate(table.schema):
            if pyarrow.types.is_timestamp(column.type):  # nanoseconds and time zones need other packages
                table = table.set_column(place, column.name, table.column(place).cast(pyarrow.string()))
        rows: list[Any] = table.to_pylist()
        for name, values in told.items():
            for place in (place for place, value in enumerate(values) if _is_image(value)):
                rows[place] = RowError(f'has an image in "{name}"; only problems of text are trained')
        return rows
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ProblemFileError(f"{path}: is not a readable Parquet file ({error}); download it again") from error


def _may_hold_images(name: str, kind: pyarrow.DataType) -> bool:
    """Whether it is the type of bytes, objects with bytes or a path, lists of these, nothing, or paths of images."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return _may_hold_images(name, kind.value_type)
    if types.is_struct(kind):
        return bool({"bytes", "path"} & {field.name for field in kind})
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_named = re.fullmatch(r"images?(_\d+)?", name) is not None
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_null(kind) or (is_text and is_named)


def _is_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_image, value))
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _saved_rows(folder: Path) -> Iterable[dict[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise ProblemFileError(f"{folder}: is not a readable data set ({error}); save it again") from error
    if isinstance(dataset, DatasetDict):
        splits = ", ".join(dataset)
        raise ProblemFileError(f"{folder}: has the splits {splits}; name one, such as {folder / next(iter(dataset))}")
    return dataset.with_format(None)
