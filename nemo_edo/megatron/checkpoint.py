"""Megatron distributed checkpoints: written by all ranks, loadable at any tensor- or pipeline-parallel size."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
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
    state = dist_checkpointing.load(_sharded_state(policy, with_optimizer, is_loading=True), str(folder))
    for index, chunk in enumerate(unwrap_model(policy.chunks)):
        chunk.load_state_dict(state[f"model{index}"])
    if with_optimizer:
        policy.optimizer.load_state_dict(state["optimizer"])
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
