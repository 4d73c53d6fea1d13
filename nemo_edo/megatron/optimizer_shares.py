"""The state of a distributed optimizer in a checkpoint, of which each rank writes and reads its own share.

On a rank it is a flat range of each parameter. Megatron's reshardable format has whole parameters: it gathers them on
the first data-parallel rank, and at loading each rank reads all of its tensor- and pipeline-parallel share. A range of
a matrix is a few rectangles, which Megatron's checkpoints take as they are: the files then have the same tensors,
written in other pieces, and load at any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MAIN = {"param": "fp32_param"}
"""Megatron's name of the main weights in checkpoints."""


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of blocks of a tensor of this shape that together are its flat range, in its order."""
    if len(shape) == 1:
        if begin < end:
            yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    while begin < end:
        place, inside = divmod(begin, row)
        if not inside and end - begin >= row:
            rows = (end - begin) // row
            yield (place, *(0 for _ in shape[1:])), (rows, *shape[1:])
            begin += rows * row
        else:
            stop = min(row, inside + end - begin)
            for offset, size in rectangles(shape[1:], inside, stop):
                yield (place, *offset), (1, *size)
            begin += stop - inside


def _own_ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """This rank's range of each parameter that it has some of."""
    for of_buffer in part.gbuf_ranges:
        for of_buckets in of_buffer.values():
            for of_bucket in of_buckets:
                for parameter, ranges in of_bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _pieces(tensor: ShardedTensor | ShardedTensorFactory, key: str, begin: int, end: int) -> list[ShardedTensor]:
    """The range's rectangles, without data, in the order of the range. tensor: the whole parameter of this rank."""
    parts = [replace(tensor, key=key)]
    if isinstance(tensor, ShardedTensorFactory):  # one parameter is several tensors, such as a gate and its projection
        whole = torch.empty(tensor.data.shape, device="meta")
        parts = list(nested_values(tensor.build_fn(key, whole, tensor.replica_id, None)))
    found = []
    for one in parts:
        at = one.data.storage_offset() if isinstance(tensor, ShardedTensorFactory) else 0
        if not one.data.is_contiguous():
            raise RuntimeError(f"{key}: a part of a parameter that is not contiguous has no ranges")
        low, high = max(begin - at, 0), min(end - at, one.data.numel())
        for offset, size in rectangles(one.local_shape or (1,), low, high):
            before = one.global_offset[: one.prepend_axis_num]
            inside = [start + more for start, more in zip(one.global_offset[len(before) :], offset, strict=True)]
            place, shape = (*before, *inside), (*(1 for _ in before), *size)
            found.append((at + low, replace(
                one, data=None, dtype=torch.float32, local_shape=shape, global_offset=place, axis_fragmentations=None,
                prepend_axis_num=0,
            )))  # fmt: skip
    return [piece for _, piece in sorted(found, key=lambda entry: entry[0])]


def sharded_share(part: DistributedOptimizer, model_state: dict, is_loading: bool = False, metadata=None) -> dict:
    """In the place of Megatron's ``sharded_param_state_fully_reshardable``."""
    bases = {id(base.data): base for base in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    state: dict[str, dict] = {}
    for number, (parameter, begin, end) in enumerate(_own_ranges(part)):
        base, tensors = bases[id(parameter)], part._get_main_param_and_optimizer_states(parameter)
        of_parameter = state[f"parameter {number}"] = {}
        for name, flat in tensors.items():
            if name == "step":
                continue
            name = MAIN.get(name, name)
            pieces, at = _pieces(base, f"optimizer.state.{name}.{base.key}", begin, end), 0
            replica = (*base.replica_id[:2], part.distributed_optimizer_instance_id)
            of_parameter[name] = {}
            for place, piece in enumerate(pieces):
                count = math.prod(piece.local_shape)
                # Loading gets separate memory: nothing changes before all of it is there.
                data = torch.empty(piece.local_shape) if is_loading else flat[at : at + count].view(piece.local_shape)
                of_parameter[name][f"piece {place}"] = replace(piece, data=data, dtype=data.dtype, replica_id=replica)
                at += count
    return state


@torch.no_grad()
def load_share(part: DistributedOptimizer, state: dict) -> None:
    """In the place of Megatron's ``load_parameter_state_from_fully_reshardable``."""
    megatrons = {there: here for here, there in MAIN.items()}
    for number, (parameter, begin, end) in enumerate(_own_ranges(part)):
        tensors: dict[str, Tensor] = {}
        for name, pieces in state[f"parameter {number}"].items():
            flat = [pieces[f"piece {place}"].flatten() for place in range(len(pieces))]
            tensors[megatrons.get(name, name)] = torch.cat(flat)[: end - begin]
        part._set_main_param_and_optimizer_states(parameter, tensors)
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()
