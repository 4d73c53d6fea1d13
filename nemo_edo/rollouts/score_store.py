"""Scores of stored responses on disk, as Parquet: what a reward model gave to each step of each response.

``RUN/scores/ARM/NAME/sampled.parquet`` belongs to the responses in ``RUN/evaluations/ARM/sampled``, and
``greedy.parquet`` to the greedy ones. While they are scored, the finished parts are
``sampled.parts/part_00000.parquet`` and so on. Every file says what made the scores, and has a checksum of the scored
responses: scores of other responses are never mistaken for theirs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_edo.errors import UserError
from nemo_edo.rollouts.parquet_tables import DAMAGED, read_checked
from nemo_edo.types import ScoredRollout
from nemo_edo.utils.files import replacing

Key = tuple[str, int]
"""problem_id and sample_index of a response."""
NOT_A_MODEL = ("oracle",)
"""Names of scores that no reward model gives."""
_SCHEMA = pa.schema([("problem_id", pa.string()), ("sample_index", pa.int32()), ("steps", pa.list_(pa.float64()))])
_MADE_BY, _ROLLOUTS = b"nemo_edo.made_by", b"nemo_edo.rollouts"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class StepScores:
    """The scores of one response's steps, in order. Raises ValueError for none, and for one that is not finite."""

    steps: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.steps or not all(map(math.isfinite, self.steps)):
            raise ValueError(f"steps are {self.steps}, expected at least one score, all finite")


class ScoreStore:
    """The scores that one reward model gave to one arm's responses: the folder ``RUN/scores/ARM/NAME``.

    kind: "greedy" or "sampled". rollouts: ``rollouts_checksum`` of the responses. made_by: the folder or the URL of the
    reward model.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, kind: str, scores: Mapping[Key, StepScores], *, rollouts: str, made_by: str) -> Path:
        """Writes the scores of all responses of a kind, in whole or not at all, and removes the parts."""
        path = self._path(kind)
        _write(path, scores, rollouts, made_by)
        shutil.rmtree(self._parts(kind), ignore_errors=True)  # the file has them all
        return path

    def write_part(
        self, kind: str, part: int, scores: Mapping[Key, StepScores], *, rollouts: str, made_by: str
    ) -> Path:
        """Writes a part of a kind that is still being scored, in whole or not at all."""
        path = self._parts(kind) / f"part_{part:05d}.parquet"
        _write(path, scores, rollouts, made_by)
        return path

    def scored(self, kind: str, *, rollouts: str, made_by: str) -> dict[Key, StepScores]:
        """What there is already: everything, or the parts up to the first that is missing, or nothing.

        Raises UserError where it was made by another model. Scores of other responses count as nothing: they are of an
        earlier evaluation.
        """
        path = self._path(kind)
        numbered = (self._parts(kind) / f"part_{part:05d}.parquet" for part in itertools.count())
        paths = [path] if path.is_file() else list(itertools.takewhile(Path.is_file, numbered))
        found: dict[Key, StepScores] = {}
        for file in paths:
            scores, there = _read(file)
            if there[_MADE_BY] != made_by:
                raise UserError(
                    f"{file}: has scores of {there[_MADE_BY]}, not of {made_by}; choose another name, or remove it"
                )
            if there[_ROLLOUTS] == rollouts:
                found |= scores
        return found

    def read(self, kind: str, *, rollouts: str | None = None) -> dict[Key, StepScores]:
        """The scores of all responses of a kind.

        Raises UserError where they are missing or damaged, and where ``rollouts`` is given and they belong to others.
        """
        path = self._path(kind)
        if not path.is_file():
            begun = self._parts(kind).is_dir()
            state = "is not finished: score the run again, it resumes" if begun else "is missing: score the run first"
            raise UserError(f"{path} {state}")
        scores, there = _read(path)
        if rollouts not in (None, there[_ROLLOUTS]):
            raise UserError(f"{path}: has scores of other responses than the stored ones; score them again")
        return scores

    def has(self, kind: str) -> bool:
        return self._path(kind).is_file()

    def made_by(self, kind: str) -> str:
        """The folder or the URL of the model that gave the scores."""
        return _read(self._path(kind))[1][_MADE_BY]

    def rollouts(self, kind: str) -> str:
        """``rollouts_checksum`` of the responses that have the scores."""
        return _read(self._path(kind))[1][_ROLLOUTS]

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}.parquet"

    def _parts(self, kind: str) -> Path:
        return self.folder / f"{kind}.parts"


def check_score_name(name: str) -> None:
    """Raises UserError for a name that cannot be that of scores: it is a folder's, and part of metrics' names."""
    if not _NAME.fullmatch(name) or name in NOT_A_MODEL:
        raise UserError(
            f"{name!r} cannot be the name of scores: expected letters, digits, _, - and ., and not {NOT_A_MODEL[0]}"
        )


def rollouts_checksum(scored: Iterable[ScoredRollout]) -> str:
    """The same for the same responses (problem, sample and tokens), in whatever order they come."""
    rows = ((s.rollout.problem_id, s.rollout.sample_index, s.rollout.response_ids) for s in scored)
    return tokens_checksum((problem, sample, np.asarray(ids, dtype=np.int32)) for problem, sample, ids in rows)


def tokens_checksum(rows: Iterable[tuple[str, int, np.ndarray]]) -> str:
    """``rollouts_checksum`` of (problem_id, sample_index, response_ids int32) of each response."""
    digest = hashlib.blake2b(digest_size=16)
    for problem, sample, ids in sorted(rows, key=lambda row: row[:2]):
        digest.update(f"{problem}\n{sample}\n{len(ids)}\n".encode())
        digest.update(np.ascontiguousarray(ids, dtype="<i4").data)
    return digest.hexdigest()


def _write(path: Path, scores: Mapping[Key, StepScores], rollouts: str, made_by: str) -> None:
    columns = {
        "problem_id": [problem for problem, _ in scores],
        "sample_index": [sample for _, sample in scores],
        "steps": [list(one.steps) for one in scores.values()],
    }
    schema = _SCHEMA.with_metadata({_ROLLOUTS: rollouts, _MADE_BY: made_by})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pydict(columns, schema=schema), file, compression="zstd", write_page_checksum=True)


def _read(path: Path) -> tuple[dict[Key, StepScores], dict[bytes, str]]:
    try:
        table = read_checked(path, _SCHEMA)
        columns = table.to_pydict()
        there = {name: value.decode() for name, value in (table.schema.metadata or {}).items()}
    except DAMAGED as error:
        raise UserError(f"{path}: is not a readable Parquet file; delete it and score the run again") from error
    if not {_MADE_BY, _ROLLOUTS} <= there.keys():
        raise UserError(f"{path}: is not a file of scores; delete it and score the run again")
    keys: Sequence[Key] = list(zip(columns["problem_id"], columns["sample_index"], strict=True))
    scores = {key: StepScores(tuple(steps)) for key, steps in zip(keys, columns["steps"], strict=True)}
    if len(scores) != len(keys):
        raise UserError(f"{path}: a response has scores twice; delete it and score the run again")
    return scores, {name: there[name] for name in (_MADE_BY, _ROLLOUTS)}
