"""torch's and Megatron's process groups: everything between a fresh process and a model."""

from __future__ import annotations

import torch

from nemo_edo.config import ParallelismConfig
from nemo_edo.megatron import platform
from nemo_edo.megatron.splits import check_world


def device_and_groups(parallelism: ParallelismConfig, seed: int, threads: int | None) -> torch.device:
    """Everything between a fresh process and ``build_model``."""
    device = platform.enter(threads)
    platform.init_process_group(device)
    initialize_parallel_state(parallelism, seed)
    return device


def initialize_parallel_state(parallelism: ParallelismConfig, seed: int) -> None:
    """Megatron's process groups for this world, and its random-number tracker."""
    from megatron.core import parallel_state, tensor_parallel

    check_world(parallelism, torch.distributed.get_world_size())
    sizes = {
        "tensor_model_parallel_size": parallelism.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
        "context_parallel_size": parallelism.context_parallel_size,
        "expert_model_parallel_size": parallelism.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallelism.expert_tensor_parallel_size,
    }
    if not _has_these_sizes(parallelism):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes)
    virtual = parallelism.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None if virtual is None else 0)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _has_these_sizes(parallelism: ParallelismConfig) -> bool:
    """Whether there are process groups of these sizes already. They are reused: torch keeps the threads and
    connections of every group to the end, also of those that Megatron has forgotten."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return False
    experts = parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size
    return (
        parallel_state.get_tensor_model_parallel_world_size() == parallelism.tensor_model_parallel_size
        and parallel_state.get_pipeline_model_parallel_world_size() == parallelism.pipeline_model_parallel_size
        and parallel_state.get_context_parallel_world_size() == parallelism.context_parallel_size
        and parallel_state.get_expert_model_parallel_world_size() == parallelism.expert_model_parallel_size
        and parallel_state.get_expert_tensor_parallel_world_size() == experts
    )
