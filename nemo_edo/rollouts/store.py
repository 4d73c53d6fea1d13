"""Scored rollouts and scores of their steps on disk, as Parquet.

``iter_00003/rank_0_of_1.parquet`` has one row for each response. Earlier versions wrote a file (shard) for each of
several ranks, which are read as well. While an iteration's responses are generated, those that have ended are in
``iter_00003/parts/part_00000.parquet`` and so on, in that order.

``RUN/scores/ARM/NAME/sampled.parquet`` has what a reward model gave to each step of the responses in
``RUN/evaluations/ARM/sampled``, and ``greedy.parquet`` to the greedy ones; their parts are in ``sampled.parts``. Every
file says what made the scores, and has a checksum of the scored responses: scores of other responses are never mistaken
for theirs."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_edo.errors import UserError
from nemo_edo.types import Rollout, ScoredRollout
from nemo_edo.utils.files import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("response_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("reason", pa.string()),
        ("answer", pa.string()),
        ("well_formed", pa.bool_()),
        ("finished", pa.bool_()),
        ("policy_version", pa.int64()),
        ("seed", pa.int64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("success_at", pa.float64()),
        ("routed_experts", pa.binary()),
    ]
)
_SCORE_FIELDS = ("reward", "answer", "well_formed", "reason", "parts", "success_at")
_ADDED = {"parts": [], "success_at": ScoredRollout.success_at, "routed_experts": b""}
"""Columns that files of earlier versions lack, with what a row of these has in them."""
_TOKENIZER = "nemo_edo.tokenizer"
"""The key of the file's metadata that names the tokenizer of its token ids."""
DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)


class PartedTable:
    """``path``, or while its rows are made, the finished ones in ``parts``/part_00000.parquet and so on.
    The metadata of every file names what made its rows. advice: what to do with a damaged file."""

    def __init__(self, path: Path, parts: Path, schema: pa.Schema, advice: str) -> None:
        self.path, self.parts = path, parts
        self._schema, self._advice = schema, advice

    def write(self, rows: Iterable[Mapping[str, Any]], metadata: Mapping[str, str]) -> Path:
        """Writes all rows, and removes the parts; a reader sees the whole file or none. Raises UserError if the disk or
        the quota is full, and any other OSError as it is."""
        self._write(self.path, rows, metadata)
        shutil.rmtree(self.parts, ignore_errors=True)
        return self.path

    def write_part(self, rows: Iterable[Mapping[str, Any]], metadata: Mapping[str, str]) -> Path:
        """Writes the next part, in whole or not at all; errors as of ``write``."""
        return self._write(next(path for path in self._numbered() if not path.exists()), rows, metadata)

    def files(self) -> list[Path]:
        return [self.path] if self.path.is_file() else sorted(self.parts.glob("part_*.parquet"))

    def first_parts(self) -> list[Path]:
        """The parts up to the first that is missing."""
        return list(itertools.takewhile(Path.is_file, self._numbered()))

    def open(self, path: Path, added: Collection[str] = ()) -> tuple[pq.ParquetFile, dict[str, str]]:
        """A file and its metadata. Raises UserError where it is damaged or lacks a column, but for ``added`` ones."""
        with self.readable(path):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            names = file.schema_arrow.names
            missing = [name for name in self._schema.names if name not in added and name not in names]
            if missing:
                raise pa.ArrowInvalid(f"it has no column {missing[0]}; its columns: {', '.join(names)}")
            metadata = file.schema_arrow.metadata or {}
            return file, {key.decode(): value.decode() for key, value in metadata.items()}

    def read(self, path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The rows and the metadata of a file; errors as of ``open``."""
        file, metadata = self.open(path)
        with self.readable(path):
            return file.read(self._schema.names).to_pylist(), metadata

    @contextmanager
    def readable(self, path: Path) -> Iterator[None]:
        """Raises UserError where the file turns out to be damaged inside the block."""
        try:
            yield
        except DAMAGED as error:
            raise UserError(f"{path}: is not a readable Parquet file of this kind ({error}); {self._advice}") from error

    def _numbered(self) -> Iterator[Path]:
        return (self.parts / f"part_{number:05d}.parquet" for number in itertools.count())

    def _write(self, path: Path, rows: Iterable[Mapping[str, Any]], metadata: Mapping[str, str]) -> Path:
        table = pa.Table.from_pylist(list(rows), schema=self._schema.with_metadata(metadata))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                pq.write_table(table, file, compression="zstd", write_page_checksum=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"{path.parent}: no space left for {len(table)} rows; free some space and rerun the command to resume"
            ) from error
        return path


class RolloutStore:
    """The rollouts of a run, a folder for each iteration.

    pandas and DuckDB read the files as they are. Log-probabilities are kept in float32, seeds must fit in int64.

    tokenizer: the identity of the one that the token ids belong to (``tokenizer_identity``). It is written into every
    file, and a file that names another one is not read."""

    def __init__(self, folder: str | Path, *, tokenizer: str | None = None) -> None:
        self.folder = Path(folder)
        self.tokenizer = tokenizer
        self._metadata = {} if tokenizer is None else {_TOKENIZER: tokenizer}

    def write(self, iteration: int, scored: Sequence[ScoredRollout]) -> Path:
        """Writes the iteration's file, in the place of its parts, and returns its path; as ``PartedTable.write``."""
        return self._table(iteration).write(map(_row, scored), self._metadata)

    def write_part(self, iteration: int, scored: Sequence[ScoredRollout]) -> Path:
        """Writes the next part of an iteration that is being generated; as ``PartedTable.write_part``."""
        return self._table(iteration).write_part(map(_row, scored), self._metadata)

    def stored(self, iteration: int) -> list[ScoredRollout]:
        """The iteration's responses on disk so far, in the order in which they were written: its shards, otherwise its
        parts up to the first that is missing, otherwise nothing. Errors as of ``read``."""
        has_shards = any(self._iteration_folder(iteration).glob("rank_*_of_*.parquet"))
        paths = self._shards(iteration) if has_shards else self._table(iteration).first_parts()
        return [row for path in paths for row in self._read_rows(iteration, path)]

    def read(self, iteration: int) -> list[ScoredRollout]:
        """All ranks' rollouts, sorted by (problem_id, sample_index).
        Raises UserError if a shard is missing, damaged or of another tokenizer, or has another number of ranks."""
        scored = [row for path in self._shards(iteration) for row in self._read_rows(iteration, path)]
        return sorted(scored, key=lambda one: (one.rollout.problem_id, one.rollout.sample_index))

    def read_table(self, iteration: int, columns: Sequence[str]) -> pa.Table:
        """Some columns of all ranks' rollouts, in the order in which they were written; errors as of ``read``."""
        return pa.concat_tables([self._read(iteration, path, columns) for path in self._shards(iteration)])

    def lost(self, iterations: Iterable[int]) -> list[Path]:
        """The first damaged file of each complete iteration that has one, or its folder where that lacks one."""
        found = []
        for iteration in iterations:
            path = self._iteration_folder(iteration)
            try:
                for path in self._shards(iteration):
                    self._read(iteration, path)
            except UserError:
                found.append(path)
        return found

    def _iteration_folder(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:05d}"

    def _table(self, iteration: int) -> PartedTable:
        folder, advice = self._iteration_folder(iteration), "delete it to generate its rollouts again"
        return PartedTable(folder / "rank_0_of_1.parquet", folder / "parts", _SCHEMA, advice)

    def _shards(self, iteration: int) -> list[Path]:
        folder = self._iteration_folder(iteration)
        found = {path.name for path in folder.glob("rank_*_of_*.parquet")}
        names = [f"rank_{rank}_of_{len(found)}.parquet" for rank in range(len(found))]
        if not found or found != set(names):
            raise UserError(
                f"{folder}: has {', '.join(sorted(found)) or 'no rollouts'}, expected rank_0_of_N.parquet to "
                "rank_(N-1)_of_N.parquet; restore missing ones from a copy, delete those of another number of ranks"
            )
        return [folder / name for name in names]

    def _read_rows(self, iteration: int, path: Path) -> Iterator[ScoredRollout]:
        table, prompts = self._read(iteration, path), {}
        with self._table(iteration).readable(path):
            for batch in table.to_batches(max_chunksize=64):  # Python's numbers are many times as large as Arrow's
                for row in batch.to_pylist():
                    prompt = tuple(row["prompt_ids"])
                    row["prompt_ids"] = prompts.setdefault(prompt, prompt)
                    scores = {name: row.pop(name) for name in _SCORE_FIELDS}
                    scores["parts"] = dict(scores["parts"])
                    yield ScoredRollout(Rollout(**row), **scores)

    def _read(self, iteration: int, path: Path, columns: Sequence[str] = _SCHEMA.names) -> pa.Table:
        """The columns, with those that a file of an earlier version lacks. Raises UserError for another tokenizer's."""
        file, metadata = self._table(iteration).open(path, added=_ADDED)
        there = metadata.get(_TOKENIZER)
        if there is not None and self.tokenizer is not None and there != self.tokenizer:
            raise UserError(f"{path}: has token ids of another tokenizer: {there}; this run's is {self.tokenizer}")
        with self._table(iteration).readable(path):
            table = file.read([name for name in columns if name in file.schema_arrow.names])
        for name in set(columns) - set(table.column_names):
            table = table.append_column(_SCHEMA.field(name), [[_ADDED[name]] * len(table)])
        return table.select(list(columns))


def _row(scored: ScoredRollout) -> dict[str, Any]:
    row = {**vars(scored.rollout), **{name: getattr(scored, name) for name in _SCORE_FIELDS}}
    return row | {name: np.asarray(row[name]) for name in ("response_ids", "response_logprobs")}


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that give every token the same id, whatever folder they come from."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    digest = hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest()
    return f"{digest} ({len(tokenizer)} tokens)"


def estimate_bytes(num_rollouts: int, max_prompt: int, max_response: int) -> int:
    """An upper bound, in bytes, of the disk space of rollouts with the given lengths in tokens.
    Ids and log-probabilities take 4 bytes each; 8 bytes of text per token are generous; compression is left out."""
    per_rollout = 4 * max_prompt + (4 + 4 + 8) * max_response + 256
    file_overhead = 32 * 1024
    return num_rollouts * per_rollout + file_overhead


def free_bytes(folder: str | Path) -> int:
    folder = Path(folder).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def require_room(setting: str, folder: str | Path, needed: int) -> None:
    """Raises UserError if the file system of ``folder`` (which need not exist yet) has fewer bytes free. setting: the
    key of the config that chooses the folder."""
    free = free_bytes(folder)
    if free < needed:
        raise UserError(
            f"{setting}: {Path(folder).absolute()} needs {needed / 2**30:.3g} GiB and has {free / 2**30:.3g} GiB free; "
            f"free some space, or set {setting} to a folder of another file system"
        )


# --- scores of stored responses ---------------------------------------------------------------------------------------

Key = tuple[str, int]
"""problem_id and sample_index of a response."""
NOT_A_MODEL = ("oracle",)
"""Names of scores that no reward model gives."""
_SCORES = pa.schema([("problem_id", pa.string()), ("sample_index", pa.int32()), ("steps", pa.list_(pa.float64()))])
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
    reward model."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, kind: str, scores: Mapping[Key, StepScores], *, rollouts: str, made_by: str) -> Path:
        return self._table(kind).write(_rows(scores), {_ROLLOUTS: rollouts, _MADE_BY: made_by})

    def write_part(self, kind: str, scores: Mapping[Key, StepScores], *, rollouts: str, made_by: str) -> None:
        self._table(kind).write_part(_rows(scores), {_ROLLOUTS: rollouts, _MADE_BY: made_by})

    def scored(self, kind: str, *, rollouts: str, made_by: str) -> dict[Key, StepScores]:
        """What there is already: everything, or the parts.
        Raises UserError where it was made by another model. Scores of other responses count as nothing: they are of an
        earlier evaluation."""
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
        """The scores of all responses of a kind, and these' checksum. UserError where they are missing or damaged."""
        path = self._table(kind).path
        if not path.is_file():
            raise UserError(f"{path} is missing or not finished: score the run, which resumes")
        return self._read(kind, path)[:2]

    def _table(self, kind: str) -> PartedTable:
        return PartedTable(self.folder / f"{kind}.parquet", self.folder / f"{kind}.parts", _SCORES, _ADVICE)

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
