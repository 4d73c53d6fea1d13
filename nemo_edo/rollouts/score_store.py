"""Scores of stored responses on disk, as Parquet: what a reward model gave to each step of each response.

``RUN/scores/ARM/NAME/sampled.parquet`` belongs to the responses in ``RUN/evaluations/ARM/sampled``, and
``greedy.parquet`` to the greedy ones; their parts are in ``sampled.parts``. Every file says what made the scores, and
has a checksum of the scored responses: scores of other responses are never mistaken for theirs.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from nemo_edo.errors import UserError
from nemo_edo.rollouts.store import PartedTable
from nemo_edo.types import ScoredRollout

Key = tuple[str, int]
"""problem_id and sample_index of a response."""
NOT_A_MODEL = ("oracle",)
"""Names of scores that no reward model gives."""
_SCHEMA = pa.schema([("problem_id", pa.string()), ("sample_index", pa.int32()), ("steps", pa.list_(pa.float64()))])
_ADVICE = "delete it and score the run again"
_MADE_BY, _ROLLOUTS = "nemo_edo.made_by", "nemo_edo.rollouts"
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
        return self._table(kind).write(_rows(scores), {_ROLLOUTS: rollouts, _MADE_BY: made_by})

    def write_part(self, kind: str, scores: Mapping[Key, StepScores], *, rollouts: str, made_by: str) -> None:
        self._table(kind).write_part(_rows(scores), {_ROLLOUTS: rollouts, _MADE_BY: made_by})

    def scored(self, kind: str, *, rollouts: str, made_by: str) -> dict[Key, StepScores]:
        """What there is already: everything, or the parts.

        Raises UserError where it was made by another model. Scores of other responses count as nothing: they are of an
        earlier evaluation.
        """
        found: dict[Key, StepScores] = {}
        for file in self._table(kind).files():
            scores, its_rollouts, its_maker = self._read(kind, file)
            if its_maker != made_by:
                raise UserError(
                    f"{file}: has scores of {its_maker}, not of {made_by}; choose another name, or remove it"
                )
            if its_rollouts == rollouts:
                found |= scores
        return found

    def read(self, kind: str) -> tuple[dict[Key, StepScores], str]:
        """The scores of all responses of a kind, and the checksum of these. Raises UserError where they are missing or
        damaged."""
        path = self._table(kind).path
        if not path.is_file():
            raise UserError(f"{path} is missing or not finished: score the run, which resumes")
        return self._read(kind, path)[:2]

    def _table(self, kind: str) -> PartedTable:
        return PartedTable(self.folder / f"{kind}.parquet", self.folder / f"{kind}.parts", _SCHEMA, _ADVICE)

    def _read(self, kind: str, path: Path) -> tuple[dict[Key, StepScores], str, str]:
        rows, metadata = self._table(kind).read(path)
        scores = {(row["problem_id"], row["sample_index"]): StepScores(tuple(row["steps"])) for row in rows}
        if len(scores) != len(rows) or not {_MADE_BY, _ROLLOUTS} <= metadata.keys():
            raise UserError(f"{path}: does not say what it scores, or scores a response twice; {_ADVICE}")
        return scores, metadata[_ROLLOUTS], metadata[_MADE_BY]


def _rows(scores: Mapping[Key, StepScores]) -> list[dict]:
    return [{"problem_id": p, "sample_index": s, "steps": list(one.steps)} for (p, s), one in scores.items()]


def check_score_name(name: str) -> None:
    """Raises UserError for a name that cannot be that of scores: it is a folder's, and part of metrics' names."""
    if not _NAME.fullmatch(name) or name in NOT_A_MODEL:
        raise UserError(
            f"{name!r} cannot be the name of scores: expected letters, digits, _, - and ., and not {NOT_A_MODEL[0]}"
        )


def rollouts_checksum(scored: Iterable[ScoredRollout]) -> str:
    """The same for the same responses (problem, sample and tokens), in whatever order they come."""
    return tokens_checksum((s.rollout.problem_id, s.rollout.sample_index, s.rollout.response_ids) for s in scored)


def tokens_checksum(rows: Iterable[tuple[str, int, Iterable[int]]]) -> str:
    """``rollouts_checksum`` of (problem_id, sample_index, response_ids) of each response."""
    digest = hashlib.blake2b(digest_size=16)
    for problem, sample, ids in sorted(rows, key=lambda row: row[:2]):
        digest.update(f"{problem}\n{sample}\n{len(ids)}\n".encode())
        digest.update(np.ascontiguousarray(ids, dtype="<i4").data)
    return digest.hexdigest()
