"""Parquet files read back as they were written: pages have checksums, and what a footer says is held to a schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What Arrow tells of damaged content by."""


def read_rows(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of some columns (None: all). Raises pa.ArrowInvalid where they are not as many as the footer says in
    another place: no checksum covers it."""
    table = file.read(None if columns is None else list(columns))
    if table.num_rows != file.metadata.num_rows:
        raise pa.ArrowInvalid(f"has {table.num_rows} rows, expected {file.metadata.num_rows}")
    return table


def read_checked(path: Path, schema: pa.Schema) -> pa.Table:
    """A file with just the columns of ``schema``. Raises pa.ArrowInvalid where it has others, and what else is
    ``DAMAGED`` where it cannot be read."""
    table = read_rows(pq.ParquetFile(path, page_checksum_verification=True))
    if table.schema.names != schema.names or not all(map(is_same_column, table.schema, schema)):
        raise pa.ArrowInvalid(f"has the columns {', '.join(table.schema.names)}, expected {', '.join(schema.names)}")
    return table


def is_same_column(one: pa.Field, other: pa.Field) -> bool:
    """Whether both have the name and the kind of values, in whatever size and spelling a tool has written them: a
    flipped bit in a footer makes a list of numbers one of names."""
    return one.name == other.name and _kind(one.type) == _kind(other.type)


def _kind(kind: pa.DataType) -> str:
    is_a = pa.types
    if is_a.is_map(kind):
        return f"map {_kind(kind.key_type)} {_kind(kind.item_type)}"
    if is_a.is_list(kind) or is_a.is_large_list(kind):
        return f"list {_kind(kind.value_type)}"
    if is_a.is_string(kind) or is_a.is_large_string(kind):
        return "text"
    if is_a.is_integer(kind):
        return "integer"
    return "number" if is_a.is_floating(kind) else str(kind)
