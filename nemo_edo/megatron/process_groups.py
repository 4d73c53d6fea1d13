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
    """Megatron's process groups for this world, and its random-number tracker.

    Groups of these sizes are reused: torch keeps the threads and connections of every group to the end, also of those
    that Megatron has forgotten.
    """
    from megatron.core import parallel_state, tensor_parallel

    check_world(parallelism, torch.distributed.get_world_size())
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {kind: getattr(parallelism, f"{kind}_parallel_size") for kind in kinds}
    sizes["expert_tensor"] = sizes["expert_tensor"] or sizes["tensor_model"]
    if not parallel_state.is_initialized() or any(
        getattr(parallel_state, f"get_{kind}_parallel_world_size")() != size for kind, size in sizes.items()
    ):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**{f"{kind}_parallel_size": size for kind, size in sizes.items()})
    virtual = parallelism.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None if virtual is None else 0)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
