"""A training batch on disk, in one safetensors file, with its metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nemo_edo.errors import UserError
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.files import replacing

RENAMED = {"exploration_weights": "exploration_factors"}
"""Tensors' names in files of earlier versions: a run that was stopped under one resumes under this one."""


def write_batch(batch: TrainingBatch, about: dict[str, Any], path: Path) -> None:
    """The file appears when it is whole. about: values for JSON, by name; NaN and infinities survive."""
    tensors = {name: tensor.contiguous() for name, tensor in batch.tensors().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(save(tensors, metadata={name: json.dumps(value) for name, value in about.items()}))


def read_batch(path: Path) -> tuple[TrainingBatch, dict[str, Any]]:
    """What ``write_batch`` was given, to the last bit. Raises UserError for a file that is not a batch."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {RENAMED.get(name, name): file.get_tensor(name) for name in file.keys()}
            about = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
        return TrainingBatch(**tensors), about
    except (SafetensorError, OSError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a batch ({error})") from error
