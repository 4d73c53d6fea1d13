"""Parquet files read back as they were written: each page has a checksum, which is verified."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)
"""The exceptions by which Arrow tells of damaged content."""


def read_checked(path: Path, schema: pa.Schema) -> pa.Table:
    """A file with just the columns of ``schema``. Raises pa.ArrowInvalid where it has others, and what else is
    ``DAMAGED`` where it cannot be read."""
    table = pq.ParquetFile(path, page_checksum_verification=True).read()
    if table.schema.names != schema.names:
        raise pa.ArrowInvalid(f"has the columns {', '.join(table.schema.names)}, expected {', '.join(schema.names)}")
    return table
