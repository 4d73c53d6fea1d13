"""Parquet files that are written whole or not at all, and tables that are made in parts.

Each page has a checksum, which is verified when it is read.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_edo.errors import UserError
from nemo_edo.utils.files import replacing

DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)


def write_table(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


class PartedTable:
    """``path``, or while its rows are made, the finished ones in ``parts``/part_00000.parquet and so on.

    The metadata of every file names what made its rows. advice: what to do with a damaged file.
    """

    def __init__(self, path: Path, parts: Path, schema: pa.Schema, advice: str) -> None:
        self.path, self.parts = path, parts
        self._schema, self._advice = schema, advice

    def write(self, rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, str]) -> Path:
        """Writes all rows, and removes the parts."""
        write_table(self.path, pa.Table.from_pylist(list(rows), schema=self._schema.with_metadata(metadata)))
        shutil.rmtree(self.parts, ignore_errors=True)
        return self.path

    def write_part(self, rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, str]) -> None:
        numbered = (self.parts / f"part_{number:05d}.parquet" for number in itertools.count())
        path = next(path for path in numbered if not path.exists())
        write_table(path, pa.Table.from_pylist(list(rows), schema=self._schema.with_metadata(metadata)))

    def files(self) -> list[Path]:
        return [self.path] if self.path.is_file() else sorted(self.parts.glob("part_*.parquet"))

    def read(self, path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The rows and the metadata of a file. Raises UserError where it is damaged or another table's."""
        try:
            table = pq.ParquetFile(path, page_checksum_verification=True).read()
            if table.schema.names != self._schema.names:
                raise pa.ArrowInvalid(f"its columns are {', '.join(table.schema.names)}")
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            return table.to_pylist(), metadata
        except DAMAGED as error:
            raise UserError(f"{path}: is not a readable Parquet file of this kind ({error}); {self._advice}") from error
