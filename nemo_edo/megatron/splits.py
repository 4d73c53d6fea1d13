"""Which splits a model and a world of processes allow. Checked before weights are read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from packaging.version import Version

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.errors import UserError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from nemo_edo.config.model_shape import ModelShape


def check_world(parallelism: ParallelismConfig, world: int) -> None:
    """Raises UserError where the sizes do not divide ``world`` processes."""
    sizes = {
        "tensor_model_parallel_size": parallelism.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
        "context_parallel_size": parallelism.context_parallel_size,
    }
    expert = {
        "expert_tensor_parallel_size": parallelism.expert_tensor_parallel_size or sizes["tensor_model_parallel_size"],
        "expert_model_parallel_size": parallelism.expert_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
    }
    for named, product in ((sizes, parallelism.model_ranks), (expert, parallelism.expert_ranks)):
        if world % product:
            split = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1)
            raise UserError(
                f"parallelism: {split} needs a multiple of {product} processes, got {world}: start it with torchrun "
                f"--nproc-per-node {product} --no-python, or set parallelism=auto"
            )


def check_device(parallelism: ParallelismConfig, precision: PrecisionConfig, engine: Version | None) -> None:
    """Raises UserError for what only a GPU with Transformer Engine does, or bf16 weights allow. engine: its version,
    as in ``check_fp8_support``."""
    for name, used, needed in (
        ("context_parallel_size", parallelism.context_parallel_size > 1, "1.0"),  # its attention
        ("optimizer_offload_fraction", parallelism.optimizer_offload_fraction > 0, "2.1"),  # its Adam
    ):
        if not used or (engine is not None and engine.release >= Version(needed).release):
            continue
        here = "there is no GPU" if engine is None else f"found {engine}"
        raise UserError(
            f"parallelism.{name} {getattr(parallelism, name)} needs a GPU and Transformer Engine {needed} or newer "
            f"({here}): remove it"
        )
    if parallelism.optimizer_offload_fraction and precision.dtype != "bf16":
        raise UserError(
            f"parallelism.optimizer_offload_fraction {parallelism.optimizer_offload_fraction} needs precision=bf16: "
            "Megatron-core's hybrid optimizer cannot take shards of fp32 weights"
        )


def check_splits(model: TransformerConfig | ModelShape, parallelism: ParallelismConfig, vocab_size: int) -> None:
    """Raises UserError where a size does not divide what it splits of ``model``, and says which sizes would do."""
    split = {
        "attention heads": model.num_attention_heads,
        "query groups": model.num_query_groups or model.num_attention_heads,
        "vocabulary entries": vocab_size,  # Megatron-Bridge cannot pad them
    }
    if not model.num_moe_experts:
        split["units of an MLP"] = model.ffn_hidden_size
    _divides("tensor_model_parallel_size", parallelism.tensor_model_parallel_size, split)
    layers = model.num_layers
    pipeline, virtual = parallelism.pipeline_model_parallel_size, parallelism.virtual_pipeline_model_parallel_size
    _divides("pipeline_model_parallel_size", pipeline, {"layers": layers})
    if virtual is not None:
        stage = {"layers of a pipeline stage": layers // pipeline}
        _divides("virtual_pipeline_model_parallel_size", virtual, stage, one="null")
    in_a_row = layers // (pipeline * (virtual or 1))
    if parallelism.recompute_granularity == "full" and parallelism.recompute_num_layers > in_a_row:
        raise UserError(
            f"parallelism.recompute_num_layers {parallelism.recompute_num_layers} is more than the {in_a_row} layers "
            "that a process has in a row"
        )
    expert, tensor = parallelism.expert_model_parallel_size, parallelism.expert_tensor_parallel_size
    if not model.num_moe_experts:
        for name, size in (("expert_model_parallel_size", expert), ("expert_tensor_parallel_size", tensor or 1)):
            if size > 1:
                raise UserError(f"parallelism.{name} {size}: the model has no experts; leave it at its default")
        return
    if getattr(model, "add_bias_linear", False) and (tensor or parallelism.tensor_model_parallel_size) > 1:
        raise UserError("experts with biases cannot be split: set parallelism.expert_tensor_parallel_size=1")
    _divides("expert_model_parallel_size", expert, {"experts": model.num_moe_experts})
    tensor = tensor or parallelism.tensor_model_parallel_size
    units = {"units of an expert": model.moe_ffn_hidden_size or model.ffn_hidden_size}
    _divides("expert_tensor_parallel_size", tensor, units)
    if parallelism.tensor_model_parallel_size > 1 and not parallelism.sequence_parallel:
        raise UserError(
            f"parallelism.tensor_model_parallel_size {parallelism.tensor_model_parallel_size} needs "
            "parallelism.sequence_parallel in a model with experts, as Megatron-core trains them"
        )


def check_context_parallel(model: TransformerConfig, parallelism: ParallelismConfig) -> None:
    """Raises UserError where Transformer Engine's attention would not compute a sequence that ranks share."""
    if parallelism.context_parallel_size == 1:
        return
    sinks = model.softmax_type != "vanilla"  # by heads (a2a), their gradient is C times as large
    if sinks or (model.window_size is not None and model.cp_comm_type != "a2a"):
        raise UserError(
            f"parallelism.context_parallel_size {parallelism.context_parallel_size}: Transformer Engine shares no "
            f"sequences in attention with {'sinks' if sinks else 'sliding windows'}, which this model has; set it to 1"
        )


def check_adapters(config: LoRAConfig, model: TransformerConfig | ModelShape, tensor_parallel: int) -> None:
    """Raises UserError where ``model`` cannot have adapters of this config."""
    if config.rank % tensor_parallel:
        raise UserError(
            f"lora.rank {config.rank} is not a multiple of parallelism.tensor_model_parallel_size {tensor_parallel}, "
            "over which adapters are split"
        )
    mlp = [target for target in config.targets if target in ("linear_fc1", "linear_fc2")]
    if config.rank and mlp and model.num_moe_experts:
        raise UserError(f"lora.targets {mlp} are experts in this model, which have no adapters; leave them out")
    if config.rank and "linear_fc1" in mlp and tensor_parallel > 1 and not model.gated_linear_unit:
        # Megatron-Bridge writes them to checkpoints as if they were a gate and an up projection.
        raise UserError(
            "lora.targets linear_fc1 needs parallelism.tensor_model_parallel_size 1 in a model without gated MLPs"
        )


def _divides(key: str, size: int, wholes: dict[str, int], *, one: str = "1") -> None:
    """Raises UserError, with sizes that would do, unless ``size`` divides all. one: what splits nothing."""
    rest = " and ".join(f"{whole} {what}" for what, whole in wholes.items() if whole % size)
    if rest:
        common = math.gcd(*wholes.values())
        fitting = [one, *(str(n) for n in range(2, common + 1) if common % n == 0)]
        some = ", ".join(fitting[:8]) + (", ..." if len(fitting) > 8 else "")
        raise UserError(f"parallelism.{key} {size} does not divide the model's {rest}; {some} would")
