"""Pickled parts of a checkpoint, read without running what others may have put into them: torch's and Megatron's
readers unpickle ``.metadata`` and whatever it calls an object, Transformer Engine's layers their ``_extra_state``."""

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import Adam, CPUAdam
from torch.distributed.checkpoint import CheckpointException

from nemo_edo.errors import UserError

FILE = ".metadata"
_PLAIN = {
    # What the metadata of a checkpoint is made of: classes without side effects.
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch": " ".join(["Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))]),
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
    # What Transformer Engine's layers keep: FP8's recipe, and tensors, which ``torch.load`` builds.
    "torch._utils": "_rebuild_tensor_v2",
    "torch.storage": "_load_from_bytes",
    "megatron.core.safe_globals": "safe_load_from_bytes",  # which replaces it
    "collections": "OrderedDict",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling "
    "NVFP4BlockScaling Format _FormatHelper MMParams QParams",
}
"""What may be unpickled inside ``plain_objects_only``, by module."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


def check_metadata(folder: Path) -> None:
    """Raises UserError where a checkpoint's metadata would run code, or names files outside of the folder. Call it
    inside ``plain_objects_only``."""
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


def check_scales(folder: Path, state: Mapping[str, Any]) -> None:
    """Raises UserError where what a layer of Transformer Engine keeps besides weights (FP8's recipe and scales, pickled
    into a tensor) would run code once the layer reads it. Call it inside ``plain_objects_only``, for its tensors."""
    for name, part in state.items():
        if "_extra_state" in name and isinstance(part, torch.Tensor) and part.numel():
            try:
                _Unpickler(io.BytesIO(part.cpu().numpy().tobytes())).load()
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
