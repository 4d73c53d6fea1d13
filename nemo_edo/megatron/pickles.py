"""Pickled parts of a checkpoint, read without running what others may have put into them: torch's and Megatron's
readers unpickle ``.metadata`` and whatever it calls an object, Transformer Engine's layers their ``_extra_state``."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.optimizer import Adam, CPUAdam
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
_PLAIN |= {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""What the metadata of a checkpoint is made of: classes without side effects."""


_SCALES = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # which replaces it
    ("collections", "OrderedDict"),
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
}
_SCALES |= {
    ("transformer_engine.common.recipe", name)
    for name in (
        *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"),
        *("NVFP4BlockScaling", "Format", "_FormatHelper", "MMParams", "QParams"),
    )
}
"""What Transformer Engine's layers keep: FP8's recipe, and tensors, which ``torch.load`` builds."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, allowed: Collection[tuple[str, str]]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


def check_metadata(folder: Path) -> None:
    """Raises UserError where a checkpoint's metadata would run code, or names files outside of the folder."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            read = _Unpickler(file, _PLAIN).load()
        files = {Path(place.relative_path) for place in read.storage_data.values()}
    except Exception as error:  # a damaged or forged pickle raises any type
        raise UserError(f"{path} is not loaded: {error}") from error
    strange = sorted(str(name) for name in files if name.name != str(name))
    if strange:
        raise UserError(f"{path} is not loaded: it names {strange[0]}, which is not a file of {folder}")


def check_scales(folder: Path, state: Mapping[str, Any]) -> None:
    """Raises UserError where what a layer of Transformer Engine keeps besides weights (FP8's recipe and scales, pickled
    into a tensor) would run code once the layer reads it. Call it inside ``plain_objects_only``, for its tensors."""
    for name, part in state.items():
        if "_extra_state" in name and isinstance(part, torch.Tensor) and part.numel():
            try:
                _Unpickler(io.BytesIO(part.cpu().numpy().tobytes()), _SCALES).load()
            except Exception as error:  # as in check_metadata
                raise UserError(f"{folder} is not loaded: its {name}: {error}") from error


@contextlib.contextmanager
def plain_objects_only(folder: Path) -> Iterator[None]:
    """Inside the block, ``torch.load`` builds tensors and plain values alone, whatever its callers ask for, and Adam's
    classes, which the settings of an offloaded optimizer name. UserError in the place of the errors of torch's readers:
    the checkpoint holds other objects, or is none."""
    try:
        with switched_on("TORCH_FORCE_WEIGHTS_ONLY_LOAD"), torch.serialization.safe_globals([Adam, CPUAdam]):
            yield
    except (CheckpointException, pickle.UnpicklingError) as error:
        lines = str(error).strip().splitlines()
        cause = lines[0] if isinstance(error, pickle.UnpicklingError) else lines[-1]
        raise UserError(f"{folder} cannot be loaded: {cause}") from error


@contextlib.contextmanager
def switched_on(variable: str) -> Iterator[None]:
    """The environment variable is 1 inside the block."""
    earlier = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[variable]
        else:
            os.environ[variable] = earlier
