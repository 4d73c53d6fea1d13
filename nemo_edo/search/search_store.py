"""The results of a search on disk, as Parquet: ``RUN/search/ARM/NAME/results.parquet``, one row for each problem.

While problems are searched, the finished parts are ``parts/part_00000.parquet`` and so on. Every file names its
settings, so that a search with other settings is never mistaken for this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import PartedTable
from nemo_edo.types import ABSTAINED

_LABEL = "nemo_edo.search"


@dataclass(frozen=True)
class SearchRecord:
    problem_id: str
    reward: float
    answer: str | None
    well_formed: bool
    reason: str
    finished: bool
    """Whether the solution ended by itself; otherwise it was cut off, or is only the best leaf."""
    ended: bool
    """Whether the search ended with it as a solution, cut off or not; False for the best leaf."""
    score: float
    """The reward model's score of the solution's last step."""
    text: str
    response_tokens: int
    tokens: int
    nodes: int
    samples: int
    iterations: int

    @property
    def has_verdict(self) -> bool:
        return not self.reason.startswith(ABSTAINED)


_TYPES = {"str": pa.string(), "str | None": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
_SCHEMA = pa.schema([(field.name, _TYPES[field.type]) for field in fields(SearchRecord)])


class SearchStore:
    """The folder of one search. label: JSON values that say what it is made with."""

    def __init__(self, folder: str | Path, label: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._label = dict(label)

    def found(self) -> dict[str, SearchRecord]:
        """What there is, by problem. Raises UserError where a file is damaged, or was made with something else."""
        records = {}
        for file in _table(self.folder).files():
            found, there = _read(self.folder, file)
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
        _table(self.folder).write_part([asdict(record) for record in records], {_LABEL: json.dumps(self._label)})

    def write(self, records: Sequence[SearchRecord]) -> Path:
        return _table(self.folder).write([asdict(record) for record in records], {_LABEL: json.dumps(self._label)})


def read_results(folder: str | Path) -> list[SearchRecord]:
    """The records of a finished search, whatever it was made with. Raises UserError where there are none, or they are
    damaged."""
    path = _table(Path(folder)).path
    if not path.is_file():
        raise UserError(f"{path} is missing: the search has not finished")
    return _read(Path(folder), path)[0]


def _table(folder: Path) -> PartedTable:
    return PartedTable(folder / "results.parquet", folder / "parts", _SCHEMA, "remove it")


def _read(folder: Path, path: Path) -> tuple[list[SearchRecord], dict[str, Any]]:
    rows, metadata = _table(folder).read(path)
    try:
        return [SearchRecord(**row) for row in rows], json.loads(metadata[_LABEL])
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: not the results of a search ({error!r}); remove it") from error
