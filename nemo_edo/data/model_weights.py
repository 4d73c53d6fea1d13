"""The weight files of a Hugging Face folder that ``transformers`` would read, and the tensors in their headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_edo.errors import UserError
from nemo_edo.utils.files import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = ("*.safetensors", INDEX, "pytorch_model*", "*.bin", "*.pth", "*.gguf")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: F32, BF16, F8_E4M3."""


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: model.safetensors where there is one, otherwise those that the index names;
    none without either. Raises UserError for an index that names no file of the folder."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        return []
    names = read_object(index, ("weight_map",))["weight_map"]
    if not isinstance(names, dict) or not names:
        raise UserError(f"{index}: weight_map names no files; download it again")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: weight_map names {name!r}, expected a file of this folder; download it again")
    return [folder / name for name in sorted(set(names.values()))]


def unread_files(folder: Path) -> list[str]:
    """The names of weight files, or of an index, that ``weight_files`` leaves out."""
    read = {path.name for path in weight_files(folder)}
    if WEIGHTS not in read:
        read.add(INDEX)
    present = {path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern) if path.is_file()}
    return sorted(present - read - {"training_args.bin"})


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the files that transformers reads, by name.

    Raises UserError for a file that cannot be read (an incomplete download, a Git LFS pointer), and for a tensor that
    is in two files.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}
                stored = {
                    name: StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
                    for name, header in headers.items()
                }
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); download it again") from error
        if twice := sorted(stored.keys() & tensors.keys()):
            raise UserError(f"{twice[0]} is in {tensors[twice[0]].file} and in {path.name}; remove one of the files")
        tensors |= stored
    return tensors
