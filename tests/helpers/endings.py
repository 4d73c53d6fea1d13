"""What of a run must be the same however it came to its end."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

SAME = ("data", "base", "evaluations", "rollouts", "samples.json", "test_time")
"""All that is in them."""


def metrics(run: Path, kind: str | None = None) -> list[dict]:
    """Its lines, or those of a kind, without the time that they took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines
            if kind in (None, line["kind"])]


def ending(run: Path) -> dict[str, str]:
    """Digests by file of the run folder; of a checkpoint, of its tensors."""
    files = [path for part in SAME for path in (run / part, *(run / part).rglob("*")) if path.is_file()]
    checkpoints = sorted((run / "checkpoints").iterdir())
    lines = [line for line in metrics(run) if line["kind"] != "judge"]  # a cache's replies count by who asked first
    contents = {**{path: _content(path) for path in files}, **{folder: _weights(folder) for folder in checkpoints},
                run / "metrics.jsonl": json.dumps(lines).encode()}  # fmt: skip
    return {str(path.relative_to(run)): hashlib.blake2b(content, digest_size=16).hexdigest()
            for path, content in contents.items()}


def _content(path: Path) -> bytes:
    """Without what readers do not look at: JSON's spaces, statistics of Parquet's columns."""
    try:
        if path.suffix == ".parquet":
            return repr(pq.read_table(path).to_pylist()).encode()
        if path.suffix == ".json":
            return json.dumps(json.loads(path.read_bytes())).encode()
    except (pa.ArrowException, OSError, ValueError) as error:  # damaged
        return repr(error).encode()
    return path.read_bytes()


def _weights(checkpoint: Path) -> bytes:
    """All of its tensors with Megatron's names; of one that cannot be read, what is wrong with it."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, torch.Tensor] = {}
    try:
        _load_state_dict(state, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(),
                         no_dist=True)
    except (Exception, CheckpointException) as error:  # of pickle, torch or the system: a damaged one
        return repr(error).encode()
    tensors = sorted((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
    assert tensors, checkpoint
    return b"".join(name.encode() + t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in tensors)
