"""Weights as a Hugging Face folder's safetensors files, none larger than asked for and one in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nemo_edo.errors import UserError

INDEX = "model.safetensors.index.json"


def write_shards(weights: Iterable[tuple[str, Tensor]], out: Path, max_bytes: int) -> None:
    """Writes ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with their index, in the order of
    the weights. A tensor larger than ``max_bytes`` gets a separate file. All ranks take the weights, which makes them
    gather each one; the first rank writes."""
    writes = torch.distributed.get_rank() == 0
    shards, shard, size = [], {}, 0
    for name, tensor in weights:
        if not writes:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_bytes:
            shards.append(_write(shard, out, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += num_bytes
    if writes:
        shards.append(_write(shard, out, len(shards)))
        _name(shards, out)
    torch.distributed.barrier()


def _write(shard: dict[str, Tensor], out: Path, number: int) -> dict[str, int]:
    """The sizes of its tensors, by name. How many there will be, and so their names, is not known yet."""
    path = _unnamed(out, number)
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    return {name: tensor.numel() * tensor.element_size() for name, tensor in shard.items()}


def _unnamed(out: Path, number: int) -> Path:
    return out / f"shard-{number + 1:05d}.safetensors"


def _name(shards: list[dict[str, int]], out: Path) -> None:
    total = len(shards)
    if total == 1:
        _unnamed(out, 0).replace(out / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
    for number, name in enumerate(names):
        _unnamed(out, number).replace(out / name)
    index = {
        "metadata": {"total_size": sum(size for shard in shards for size in shard.values())},
        "weight_map": {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard},
    }
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
