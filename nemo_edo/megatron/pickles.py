"""Pickled parts of a checkpoint, read without running what another person may have put into them.

torch's and Megatron's readers of distributed checkpoints unpickle ``.metadata`` and whatever it calls an object.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, filesystem, metadata, planner

from nemo_edo.errors import UserError

FILE = ".metadata"
_PLAIN = {
    (module.__name__, name)
    for module, names in (
        (metadata, ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
        (metadata, ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
        (filesystem, ("_StorageInfo",)),
        (planner, ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    )
    for name in names
}
_PLAIN |= {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
"""What the metadata of a checkpoint is made of: classes without side effects."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


def check_metadata(folder: Path) -> None:
    """Raises UserError where a checkpoint's metadata would run code, or names files outside of the folder."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            read = _Unpickler(file).load()
        files = {Path(place.relative_path) for place in read.storage_data.values()}
    except Exception as error:  # a damaged or forged pickle raises any type
        raise UserError(f"{path} is not loaded: {error}") from error
    strange = sorted(str(name) for name in files if name.name != str(name))
    if strange:
        raise UserError(f"{path} is not loaded: it names {strange[0]}, which is not a file of {folder}")


@contextlib.contextmanager
def plain_objects_only(folder: Path) -> Iterator[None]:
    """Inside the block, ``torch.load`` builds tensors and plain values alone, whatever its callers ask for. UserError
    in the place of the errors of torch's readers: the checkpoint holds other objects, or is none."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    earlier = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    except (CheckpointException, pickle.UnpicklingError) as error:
        lines = str(error).strip().splitlines()
        cause = lines[0] if isinstance(error, pickle.UnpicklingError) else lines[-1]
        raise UserError(f"{folder} cannot be loaded: {cause}") from error
    finally:
        if earlier is None:
            del os.environ[name]
        else:
            os.environ[name] = earlier
