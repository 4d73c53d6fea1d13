"""The results of a search on disk, as Parquet: ``RUN/search/ARM/NAME/results.parquet``, one row for each problem.

While problems are searched, the finished parts are ``parts/part_00000.parquet`` and so on. Every file names its
settings, so that a search with other settings is never mistaken for this one.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_edo.errors import UserError
from nemo_edo.rollouts.parquet_tables import read_checked
from nemo_edo.types import ABSTAINED
from nemo_edo.utils.files import replacing

_LABEL = b"nemo_edo.search"


@dataclass(frozen=True)
class SearchRecord:
    """The result of one problem's search."""

    problem_id: str
    reward: float
    """The verifier's reward of the answer."""
    answer: str | None
    well_formed: bool
    reason: str
    """Why the reward is what it is, in words."""
    finished: bool
    """Whether the solution ended by itself; otherwise it was cut off, or is only the best leaf."""
    ended: bool
    """Whether the search ended with it as a solution, cut off or not; False for the best leaf."""
    score: float
    """The reward model's score of the solution's last step."""
    text: str
    response_tokens: int
    """Tokens of the solution."""
    tokens: int
    """Tokens sampled for the whole search."""
    nodes: int
    samples: int
    """Steps that were sampled."""
    iterations: int

    @property
    def has_verdict(self) -> bool:
        """Whether the reward is a verdict; otherwise a judge abstained."""
        return not self.reason.startswith(ABSTAINED)


_TYPES = {"str": pa.string(), "str | None": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
_SCHEMA = pa.schema([(field.name, _TYPES[field.type]) for field in fields(SearchRecord)])


class SearchStore:
    """The folder of one search. label: JSON values that say what it is made with."""

    def __init__(self, folder: str | Path, label: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._label = dict(label)
        self._parts = self.folder / "parts"

    def found(self) -> dict[str, SearchRecord]:
        """What there is, by problem. Raises UserError where a file is damaged, or was made with something else."""
        path = self.folder / "results.parquet"
        records = {}
        for file in [path] if path.is_file() else sorted(self._parts.glob("part_*.parquet")):
            found, there = _read(file)
            different = sorted(key for key in there | self._label if there.get(key) != self._label.get(key))
            if different:
                key = different[0]
                raise UserError(
                    f"{file}: made with another {key}: {there.get(key)!r} there and {self._label.get(key)!r} here "
                    f"({', '.join(different)} differ); choose another search.name, or remove it"
                )
            records |= {record.problem_id: record for record in found}
        return records

    def write_part(self, records: Sequence[SearchRecord]) -> None:
        """Adds the records of some problems, in whole or not at all."""
        numbered = (self._parts / f"part_{number:05d}.parquet" for number in itertools.count())
        self._write(next(path for path in numbered if not path.exists()), records)

    def write(self, records: Sequence[SearchRecord]) -> Path:
        """Writes the records of all problems, and removes the parts."""
        path = self.folder / "results.parquet"
        self._write(path, records)
        shutil.rmtree(self._parts, ignore_errors=True)  # the file has them all
        return path

    def _write(self, path: Path, records: Sequence[SearchRecord]) -> None:
        schema = _SCHEMA.with_metadata({_LABEL: json.dumps(self._label)})
        table = pa.Table.from_pylist([asdict(record) for record in records], schema=schema)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def read_results(folder: str | Path) -> list[SearchRecord]:
    """The records of a finished search, whatever it was made with. Raises UserError where there are none, or they are
    damaged."""
    path = Path(folder) / "results.parquet"
    if not path.is_file():
        raise UserError(f"{path} is missing: the search has not finished")
    return _read(path)[0]


def _read(path: Path) -> tuple[list[SearchRecord], dict[str, Any]]:
    """The records and the label of a file."""
    try:
        table = read_checked(path, _SCHEMA)
        return [SearchRecord(**row) for row in table.to_pylist()], json.loads(table.schema.metadata[_LABEL])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the results of a search, or damaged ({error}); remove it") from error
