"""The state of Megatron's optimizers in checkpoints.

Adam is PyTorch's on a CPU and Transformer Engine's on a GPU, which Megatron's distributed optimizer is written for.
PyTorch's counts steps for each parameter, the other for each group of parameters, and their groups' settings differ.

Of a distributed optimizer each rank writes and reads its own share, a flat range of each parameter. Megatron's
reshardable format has whole parameters: it gathers them on the first data-parallel rank, and at loading each rank reads
all of its tensor- and pipeline-parallel share. A range of a matrix is a few rectangles, which Megatron's checkpoints
take as they are: the files then have the same tensors, written in other pieces, and load at any layout.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import Adam, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that Megatron has chained."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def distributed(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    return [part for part in parts(optimizer) if isinstance(part, DistributedOptimizer)]


def adapt_checkpointing(optimizer: MegatronOptimizer) -> None:
    """Makes a new optimizer's checkpoints what this module describes. It replaces methods of these objects alone."""
    for part in distributed(optimizer):
        part.sharded_param_state_fully_reshardable = partial(_sharded_share, part)
        part.load_parameter_state_from_fully_reshardable = partial(_load_share, part)
        if isinstance(part.optimizer, torch.optim.Adam):
            part._set_main_param_and_optimizer_states = partial(_set_with_counter, part)
    for part in parts(optimizer):
        if isinstance(part.optimizer, Adam):
            part.optimizer.load_state_dict = partial(_load_either, part.optimizer)


def begin_adam(optimizer: MegatronOptimizer) -> None:
    """Loading fills existing tensors: PyTorch's Adam makes its moments and step counters at its first step only."""
    for state, parameter, _ in _states_of_torch(optimizer):
        if not state:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state |= {"step": torch.tensor(0.0), **moments}


def count_adam_steps(optimizer: MegatronOptimizer) -> None:
    """Megatron loads the number of steps into the parameter groups; PyTorch's Adam counts for each parameter."""
    for state, _, group in _states_of_torch(optimizer):
        state["step"] = torch.tensor(float(group["step"]))


def _states_of_torch(optimizer: MegatronOptimizer) -> Iterator[tuple[dict, torch.nn.Parameter, dict]]:
    """Each parameter's state in PyTorch's Adam, the parameter and its group."""
    for part in distributed(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                yield from ((part.optimizer.state[parameter], parameter, group) for parameter in group["params"])


def _set_with_counter(part: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
    """Sets the tensors, with the parameter's step counter, which a reshardable state lacks and Megatron asks for."""
    group, place = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
    DistributedOptimizer._set_main_param_and_optimizer_states(part, parameter, {"step": state["step"], **tensors})


def _load_either(adam: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the state of either Adam."""
    groups, parameters = state["param_groups"], state["state"]
    counters = [each.pop("step") for each in parameters.values() if "step" in each]
    counters = counters or [group["step"] for group in groups if "step" in group]
    steps = int(max(counters, default=0))
    if isinstance(adam, torch.optim.Adam):
        parameters = {place: {"step": torch.tensor(float(steps)), **each} for place, each in parameters.items()}
    own = [{name: value for name, value in group.items() if name != "params"} for group in adam.param_groups]
    groups = [{**mine, **group, "step": steps} for mine, group in zip(own, groups, strict=True)]
    type(adam).load_state_dict(adam, {"state": parameters, "param_groups": groups})


# --- a rank's share of a distributed optimizer ---------------------------------------------------------------------


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
    for parameter in part.model_param_gbuf_map:
        own = part._get_model_param_range_map(parameter)["param"]
        yield parameter, own.start, own.end


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


def _sharded_share(part: DistributedOptimizer, model_state: dict, is_loading: bool = False, metadata=None) -> dict:
    """A rank's share of the state, instead of Megatron's ``sharded_param_state_fully_reshardable``."""
    bases = {id(base.data): base for base in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    state: dict[str, dict] = {}
    for number, (parameter, begin, end) in enumerate(_own_ranges(part)):
        base, tensors = bases[id(parameter)], part._get_main_param_and_optimizer_states(parameter)
        of_parameter = state[f"parameter {number}"] = {}
        for name, flat in tensors.items():
            if name == "step":
                continue
            stored = "fp32_param" if name == "param" else name  # Megatron's name of the main weights in checkpoints
            pieces, at = _pieces(base, f"optimizer.state.{stored}.{base.key}", begin, end), 0
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
def _load_share(part: DistributedOptimizer, state: dict) -> None:
    """Loads a rank's share, instead of Megatron's ``load_parameter_state_from_fully_reshardable``."""
    for number, (parameter, begin, end) in enumerate(_own_ranges(part)):
        tensors: dict[str, Tensor] = {}
        for name, pieces in state[f"parameter {number}"].items():
            flat = [pieces[f"piece {place}"].flatten() for place in range(len(pieces))]
            tensors[name] = torch.cat(flat)[: end - begin]
        part._set_main_param_and_optimizer_states(parameter, tensors)
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()
