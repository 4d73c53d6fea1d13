"""Which splits a model and a world of processes allow. Checked before weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_edo.config import ParallelismConfig
from nemo_edo.errors import UserError

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig

    from nemo_edo.model_shape import ModelShape


def check_world(parallelism: ParallelismConfig, world: int) -> None:
    """Raises UserError where ``world`` processes cannot be split so."""
    sizes = {
        "tensor_model_parallel_size": parallelism.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
        "context_parallel_size": parallelism.context_parallel_size,
    }
    _divide_world(sizes, parallelism.model_ranks, world)
    expert = {
        "expert_tensor_parallel_size": parallelism.expert_tensor_parallel_size or sizes["tensor_model_parallel_size"],
        "expert_model_parallel_size": parallelism.expert_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
    }
    _divide_world(expert, parallelism.expert_ranks, world)


def check_device(parallelism: ParallelismConfig, device: torch.device) -> None:
    """Raises UserError for what only a GPU does."""
    for name, used, why in (
        ("context_parallel_size", parallelism.context_parallel_size > 1, "Transformer Engine's attention"),
        ("optimizer_offload_fraction", parallelism.optimizer_offload_fraction > 0, "memory to offload from"),
    ):
        if used and device.type != "cuda":
            raise UserError(f"parallelism.{name} {getattr(parallelism, name)} needs a GPU ({why}); take it out")


def _divide_world(sizes: dict[str, int], product: int, world: int) -> None:
    if world % product:
        split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"{world} processes cannot be split into {split}: start a multiple of {product} processes")


def check_splits(model: TransformerConfig | ModelShape, parallelism: ParallelismConfig, vocab_size: int) -> None:
    """Raises UserError where a size does not divide what it splits of ``model``, and says which sizes would."""
    tensor, pipeline = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    groups = model.num_query_groups or model.num_attention_heads
    key = "tensor_model_parallel_size"
    _divides(key, tensor, model.num_attention_heads, "attention heads")
    _divides(key, tensor, groups, "query groups")
    _divides(key, tensor, vocab_size, "vocabulary entries")  # Megatron-Bridge 0.3 cannot pad them
    if not model.num_moe_experts:
        _divides(key, tensor, model.ffn_hidden_size, "units of an MLP")
    _divides("pipeline_model_parallel_size", pipeline, model.num_layers, "layers")
    virtual = parallelism.virtual_pipeline_model_parallel_size
    if virtual is not None:
        stage = model.num_layers // pipeline
        _divides("virtual_pipeline_model_parallel_size", virtual, stage, "layers of a pipeline stage")
    _check_experts(model, parallelism)
    layers = model.num_layers // (pipeline * (virtual or 1))
    if parallelism.recompute_granularity == "full" and parallelism.recompute_num_layers > layers:
        raise UserError(
            f"parallelism.recompute_num_layers {parallelism.recompute_num_layers} is more than the {layers} layers "
            "that a process holds in a row"
        )


def _check_experts(model: TransformerConfig | ModelShape, parallelism: ParallelismConfig) -> None:
    expert, tensor = parallelism.expert_model_parallel_size, parallelism.expert_tensor_parallel_size
    if not model.num_moe_experts:
        for name, size in (("expert_model_parallel_size", expert), ("expert_tensor_parallel_size", tensor or 1)):
            if size > 1:
                raise UserError(f"parallelism.{name} {size}: the model has no experts; leave it at its default")
        return
    _divides("expert_model_parallel_size", expert, model.num_moe_experts, "experts")
    _divides(
        "expert_tensor_parallel_size",
        tensor or parallelism.tensor_model_parallel_size,
        model.moe_ffn_hidden_size,
        "units of an expert",
    )
    if parallelism.tensor_model_parallel_size > 1 and not parallelism.sequence_parallel:
        raise UserError(
            f"parallelism.tensor_model_parallel_size {parallelism.tensor_model_parallel_size} needs "
            "parallelism.sequence_parallel in a model with experts, as Megatron-core trains them"
        )


def _divides(key: str, size: int, whole: int, what: str) -> None:
    if whole % size:
        fitting = [str(n) for n in range(1, whole + 1) if whole % n == 0]
        some = ", ".join(fitting[:8]) + (", ..." if len(fitting) > 8 else "")
        raise UserError(f"parallelism.{key} {size} does not divide the model's {whole} {what}; {some} would")
