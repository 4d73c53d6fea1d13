"""Megatron distributed checkpoints: written by all ranks, loadable at any tensor- or pipeline-parallel size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from nemo_edo.errors import UserError
from nemo_edo.megatron.policy import MegatronPolicy

# The optimizer's sharding that runs over gloo as well as NCCL; it asks for the same data-parallel size at loading.
OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def save(policy: MegatronPolicy, folder: Path, *, with_optimizer: bool = False) -> None:
    """Writes a checkpoint folder; it appears under its name only when it is whole. Every rank calls it."""
    staging = folder.with_name(folder.name + ".part")
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)  # what a killed run left behind
        staging.mkdir(parents=True)
    torch.distributed.barrier()
    state = _sharded_state(policy, with_optimizer, is_loading=False)
    dist_checkpointing.save(state, str(staging), content_metadata=OPTIMIZER_METADATA)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        staging.replace(folder)
    torch.distributed.barrier()


@torch.no_grad()  # the distributed optimizer copies into parameters
def load(policy: MegatronPolicy, folder: Path, *, with_optimizer: bool = False) -> None:
    """Puts a checkpoint's weights (and optimizer state) in place. Raises UserError where there is none."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise UserError(f"{folder} is not a checkpoint: it has no metadata.json of Megatron's")
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


def _sharded_state(policy: MegatronPolicy, with_optimizer: bool, *, is_loading: bool) -> dict:
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(unwrap_model(policy.chunks))}
    if with_optimizer:
        model_state = {key: value for part in state.values() for key, value in part.items()}
        state["optimizer"] = policy.optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=OPTIMIZER_METADATA
        )
        state["scheduler"] = policy.scheduler.state_dict()
    return state


# --- PyTorch's Adam in Megatron's distributed optimizer, which is written for Transformer Engine's ------------------


def _adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Adam]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            yield part.optimizer


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
