"""Megatron distributed checkpoints: written by all ranks, loadable at any tensor- or pipeline-parallel size."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from nemo_edo.errors import UserError
from nemo_edo.megatron.checksums import FILE as CHECKSUMS
from nemo_edo.megatron.checksums import check_checksums, write_checksums
from nemo_edo.megatron.lora import describe
from nemo_edo.megatron.policy import MegatronPolicy, Weights

# The optimizer's sharding that runs over gloo as well as NCCL; it asks for the same data-parallel size at loading.
OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
ABOUT = "about.json"
SHAPES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def save(
    policy: MegatronPolicy,
    folder: Path,
    *,
    with_optimizer: bool = False,
    reference: Weights | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a checkpoint folder; it appears under its name only when it is whole. Every rank calls it.

    An earlier folder of that name is replaced. reference: a frozen copy of the policy's weights (``snapshot``) to be
    kept as well. extra: what ``load_extra`` gives back, plain values for JSON.
    """
    staging = folder.with_name(folder.name + ".part")
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)  # what a killed run left behind
        staging.mkdir(parents=True)
    torch.distributed.barrier()
    state = _sharded_state(policy, with_optimizer, is_loading=False)
    if reference is not None:
        state |= {name: part for name, (_, part) in _sharded_copy(policy, reference).items()}
    _write_without_another_process()
    dist_checkpointing.save(state, str(staging), content_metadata=OPTIMIZER_METADATA)
    if torch.distributed.get_rank() == 0:
        about = {"architecture": _architecture(policy), "optimizer": _optimizer_layout(policy, with_optimizer)}
        text = json.dumps({**about, "extra": extra or {}}, indent=1)
        (staging / ABOUT).write_text(text + "\n", encoding="utf-8")
    torch.distributed.barrier()
    write_checksums(staging)
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        staging.replace(folder)
    torch.distributed.barrier()


def load_extra(folder: Path) -> dict[str, Any]:
    """What ``save`` was given as ``extra``."""
    return _about(folder)["extra"]


@torch.no_grad()  # the distributed optimizer copies into parameters
def load(policy: MegatronPolicy, folder: Path, *, with_optimizer: bool = False) -> None:
    """Puts a checkpoint's weights (and optimizer state) in place.

    Raises UserError where there is none, where it is of another architecture or has no optimizer (or one that is split
    over another number of ranks), and its subclass DamagedCheckpoint where files are not what was written.
    """
    if not (folder / ABOUT).is_file() and not (folder / CHECKSUMS).is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {ABOUT}")
    check_checksums(folder)
    _check_fits(policy, folder, with_optimizer)
    if with_optimizer:
        _begin_adam(policy.optimizer)
    state = dist_checkpointing.load(_sharded_state(policy, with_optimizer, is_loading=True), str(folder))
    for index, chunk in enumerate(unwrap_model(policy.chunks)):
        chunk.load_state_dict(state[f"model{index}"])
    if with_optimizer:
        policy.optimizer.load_state_dict(state["optimizer"])
        _count_adam_steps(policy.optimizer)
        policy.scheduler.num_steps = 0  # it adds the loaded steps to its own
        policy.scheduler.load_state_dict(state["scheduler"])
    elif policy.optimizer is not None:
        policy.optimizer.reload_model_params()


def _about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ABOUT).read_text(encoding="utf-8"))


def _check_fits(policy: MegatronPolicy, folder: Path, with_optimizer: bool) -> None:
    about, here = _about(folder), _architecture(policy)
    there = about["architecture"]
    different = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if different:
        key = different[0]
        raise UserError(
            f"{folder} is a checkpoint of another model: {key} is {there.get(key)!r} there and {here.get(key)!r} here"
        )
    if not with_optimizer:
        return
    there, here = about["optimizer"], _optimizer_layout(policy, True)
    if there is None:
        raise UserError(f"{folder} holds weights alone, no state of an optimizer to go on with")
    if there != here:
        key = next(key for key in here if there[key] != here[key])
        raise UserError(
            f"{folder} holds an optimizer's state of another layout: {key} is {there[key]} there and {here[key]} here"
        )


def _architecture(policy: MegatronPolicy) -> dict[str, Any]:
    """What of a model's config the shapes of its weights follow from, and its adapters."""
    config = policy.built.bridge.hf_pretrained.config
    shapes = {name: getattr(config, name) for name in SHAPES if hasattr(config, name)}
    return {**shapes, "lora": describe(policy.built.lora)}


def _optimizer_layout(policy: MegatronPolicy, with_optimizer: bool) -> dict[str, Any] | None:
    """What of the layout an optimizer's state depends on; None without one."""
    if not with_optimizer:
        return None
    ranks = parallel_state.get_data_parallel_world_size() if any(_distributed(policy.optimizer)) else None
    return {"data-parallel ranks that split it": ranks}


def _write_without_another_process() -> None:
    """Megatron's writer hands its results over by a queue in a process of its own, which would survive a trainer that
    is killed. The writer runs in this very process: a plain queue does."""
    if not isinstance(filesystem_async._results_queue, queue.Queue):
        filesystem_async._results_queue = queue.Queue()


def _sharded_state(policy: MegatronPolicy, with_optimizer: bool, *, is_loading: bool) -> dict:
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(unwrap_model(policy.chunks))}
    if with_optimizer:
        model_state = {key: value for part in state.values() for key, value in part.items()}
        state["optimizer"] = policy.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=OPTIMIZER_METADATA
        )
        state["scheduler"] = policy.scheduler.state_dict()
    return state


# --- a frozen copy of the weights beside them ----------------------------------------------------------------------

REFERENCE = "reference."
"""What the names of its tensors begin with."""


def load_reference(policy: MegatronPolicy, folder: Path) -> Weights:
    """The weights that ``save`` was given as ``reference``; ``load`` has checked the folder's files."""
    empty = [torch.empty_like(weight, dtype=torch.float32) for weight in policy.snapshot()]
    state = _sharded_copy(policy, empty)
    loaded = dist_checkpointing.load({name: part for name, (_, part) in state.items()}, str(folder))
    weights = {place: loaded[name] for name, (place, _) in state.items()}
    return [weights[place] for place in range(len(empty))]


def _sharded_copy(policy: MegatronPolicy, weights: Weights) -> dict[str, tuple[int, ShardedTensor]]:
    """For each of the trained weights, by name: its place among them, and the copy, split as the weight itself is."""
    trained = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad]
    copy_of = {p.data_ptr(): (place, w) for place, (p, w) in enumerate(zip(trained, weights, strict=True))}
    found = {}
    for index, chunk in enumerate(unwrap_model(policy.chunks)):
        state = chunk.sharded_state_dict()
        add_prefix_for_sharding(state, REFERENCE)
        for name, sharded in state.items():
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data.data_ptr() in copy_of:
                place, sharded.data = copy_of[sharded.data.data_ptr()]
                if isinstance(sharded, ShardedTensor):
                    sharded.dtype = sharded.data.dtype
                found[f"{index} {name}"] = place, sharded
    return found


# --- PyTorch's Adam in Megatron's distributed optimizer, which is written for Transformer Engine's ------------------


def _distributed(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return (part for part in parts if isinstance(part, DistributedOptimizer))


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Adam]:
    return (part.optimizer for part in _distributed(optimizer) if isinstance(part.optimizer, torch.optim.Adam))


def _begin_adam(optimizer: MegatronOptimizer) -> None:
    """What is loaded needs a place: PyTorch's Adam makes its moments and step counters at its first step only."""
    for adam in _adams(optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _count_adam_steps(optimizer: MegatronOptimizer) -> None:
    """Megatron loads the number of steps into the parameter groups; PyTorch's Adam counts for each parameter."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]))
