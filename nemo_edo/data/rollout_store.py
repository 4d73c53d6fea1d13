"""Scored rollouts on disk, as Parquet: ``iter_00003/rank_0_of_2.parquet``, one row for each response."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_edo.errors import UserError
from nemo_edo.types import Rollout, ScoredRollout

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
    ]
)
_SCORE_FIELDS = ("reward", "answer", "well_formed", "reason")
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The device is full, or the user's quota on it."""
_SHARD_NAME = re.compile(r"rank_(\d+)_of_(\d+)\.parquet")


class DiskSpaceError(UserError):
    """The file system is too full for the run."""


class RolloutStore:
    """The rollouts of a run, a folder for each iteration and a file (shard) for each data-parallel rank.

    pandas and DuckDB read the shards as they are. Log-probabilities are kept in float32, seeds must fit in int64.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, iteration: int, scored: Sequence[ScoredRollout], *, rank: int, world_size: int) -> Path:
        """Writes this rank's shard and returns its path; a reader sees the whole file or none.

        Raises DiskSpaceError if the disk or the quota is full, any other OSError as it is, and ValueError for a rank
        outside the world (``read`` would pass over its shard).
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1} (world_size = {world_size})")
        path = self._iteration_folder(iteration) / f"rank_{rank}_of_{world_size}.parquet"
        table = pa.Table.from_pylist([_to_row(one) for one in scored], schema=_SCHEMA)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(table, path)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise DiskSpaceError(
                f"{path.parent}: no space left for {len(scored)} rollouts of iteration {iteration}; "
                "free some space and resume the run"
            ) from error
        return path

    def read(self, iteration: int) -> list[ScoredRollout]:
        """All ranks' rollouts, sorted by (problem_id, sample_index).

        Raises ValueError if a shard is missing or damaged, shards of several world sizes lie side by side, or two
        rollouts carry the same (problem_id, sample_index).
        """
        scored = [_from_row(row) for path in self._shards(iteration) for row in _read_rows(path)]
        scored.sort(key=_key)
        for one, following in itertools.pairwise(scored):
            if _key(one) == _key(following):
                raise ValueError(f"{self._iteration_folder(iteration)}: problem and sample {_key(one)} occur twice")
        return scored

    def _iteration_folder(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:05d}"

    def _shards(self, iteration: int) -> list[Path]:
        """The iteration's files in the order of the ranks."""
        folder = self._iteration_folder(iteration)
        names = [match for path in folder.glob("*.parquet") if (match := _SHARD_NAME.fullmatch(path.name))]
        world_sizes = sorted({int(match[2]) for match in names})
        if not names:
            raise ValueError(f"{folder}: has no rollouts, expected rank_0_of_N.parquet")
        if len(world_sizes) > 1:
            raise ValueError(f"{folder}: has shards of runs with {world_sizes} ranks; delete the folder's stale ones")
        missing = sorted(set(range(world_sizes[0])) - {int(match[1]) for match in names})
        if missing:
            raise ValueError(f"{folder}: the shards of ranks {missing} of {world_sizes[0]} are missing")
        return [folder / f"rank_{rank}_of_{world_sizes[0]}.parquet" for rank in range(world_sizes[0])]


def estimate_bytes(num_rollouts: int, max_prompt: int, max_response: int) -> int:
    """An upper bound, in bytes, of the disk space of rollouts with the given lengths in tokens.

    Ids and log-probabilities take 4 bytes each; 8 bytes of text a token are generous; compression is left out.
    """
    per_rollout = 4 * max_prompt + (4 + 4 + 8) * max_response + 256
    file_overhead = 32 * 1024
    return num_rollouts * per_rollout + file_overhead


def check_disk_space(folder: str | Path, needed_bytes: int) -> None:
    """Raises DiskSpaceError if the file system of ``folder`` (which need not exist yet) has less space free."""
    folder = Path(folder).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise DiskSpaceError(
            f"{folder}: needs {_size(needed_bytes)} for rollouts but has {_size(free)} free; "
            "free some space, or set output_dir to another file system"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _write_atomically(table: pa.Table, path: Path) -> None:
    """On the disk under a temporary name first, then renamed: a crash leaves no half of a file under ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_rows(path: Path) -> list[dict]:
    try:
        return pq.ParquetFile(path).read().to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: is not a readable Parquet file; delete it to draw its rollouts again") from error


def _key(scored: ScoredRollout) -> tuple[str, int]:
    return scored.rollout.problem_id, scored.rollout.sample_index


def _to_row(scored: ScoredRollout) -> dict:
    return {**vars(scored.rollout), **{name: getattr(scored, name) for name in _SCORE_FIELDS}}


def _from_row(row: dict) -> ScoredRollout:
    scores = {name: row.pop(name) for name in _SCORE_FIELDS}
    for name in ("prompt_ids", "response_ids", "response_logprobs"):
        row[name] = tuple(row[name])
    return ScoredRollout(Rollout(**row), **scores)
