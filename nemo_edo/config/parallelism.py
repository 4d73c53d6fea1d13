"""The sections of a config that say how a model is split over processes, and in which numbers it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from nemo_edo.config.checks import one_of, positive, require, share

FP8_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


@dataclass
class PrecisionConfig:
    dtype: str = "fp32"
    """fp32, or bf16 with fp32 main weights. Log-probabilities and losses are fp32 in both."""
    fp8: Optional[str] = None
    """Numbers of the matrix products in the layers: hybrid, e4m3 forward and e5m2 for gradients; e4m3 for both; null:
    those of ``dtype``. It needs dtype bf16, Transformer Engine and a GPU that has them."""
    fp8_recipe: str = "tensorwise"
    """How tensors are scaled into FP8's range: tensorwise, each by its own maximum; delayed, by maxima of steps
    before; blockwise, in blocks of 128; mxfp8, in blocks of 32 (Blackwell)."""
    fp8_margin: int = 0
    """Of the recipe delayed: scales are smaller by 2^margin."""
    fp8_amax_history_len: int = 1024
    """Of the recipe delayed: steps that the maximum is taken over."""
    fp8_param_gather: bool = False
    """Weights are kept, and gathered from the distributed optimizer, in FP8."""
    bf16_layers_at_start: int = 0
    """So many first layers compute in bf16 all the same."""
    bf16_layers_at_end: int = 0
    """So many last layers compute in bf16 all the same."""

    def __post_init__(self) -> None:
        one_of("precision.dtype", self.dtype, ("fp32", "bf16"))
        one_of("precision.fp8_recipe", self.fp8_recipe, FP8_RECIPES)
        positive(self, "precision", "fp8_amax_history_len")
        for name in ("fp8_margin", "bf16_layers_at_start", "bf16_layers_at_end"):
            require(getattr(self, name) >= 0, f"precision.{name}", getattr(self, name), "a number of at least 0")
        if self.fp8 is None:
            require(not self.fp8_param_gather, "precision.fp8_param_gather", True, "false where precision.fp8 is null")
            return
        one_of("precision.fp8", self.fp8, ("hybrid", "e4m3"))
        require(self.dtype == "bf16", "precision.dtype", self.dtype, f"bf16 with precision.fp8 {self.fp8}")
        if self.fp8_recipe == "delayed":  # Transformer Engine reduces its maxima once for all layers
            for name in ("bf16_layers_at_start", "bf16_layers_at_end"):
                require(not getattr(self, name), f"precision.{name}", getattr(self, name), "0 with fp8_recipe delayed")
        elif self.fp8_margin:
            require(False, "precision.fp8_margin", self.fp8_margin, f"0 with fp8_recipe {self.fp8_recipe}")


@dataclass
class ParallelismConfig:
    """Megatron's splits, and what else decides how much of a model a process holds. The data-parallel size is what
    remains of the world."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Groups of layers, each on processes of its own."""
    use_distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""
    sequence_parallel: bool = False
    """Tensor-parallel processes share the tokens too, where a layer works on each token alone (norms, residuals)."""
    virtual_pipeline_model_parallel_size: Optional[int] = None
    """Groups of layers on each process of a pipeline, interleaved: stages wait less for each other and send more.
    null: one."""
    context_parallel_size: int = 1
    """Processes that share a sequence's tokens in all layers, for long ones; needs Transformer Engine's attention."""
    expert_model_parallel_size: int = 1
    """Processes that the experts of a mixture-of-experts model are dealt out to, out of the data-parallel ones."""
    expert_tensor_parallel_size: Optional[int] = None
    """Processes that share each expert. null: tensor_model_parallel_size."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather the weights that the distributed optimizer has changed while the next forward pass goes on."""
    recompute_granularity: Optional[str] = None
    """Activations computed again in the backward pass rather than kept: full, of whole layers; selective, of the
    attention's core. null: none."""
    recompute_method: str = "uniform"
    """Of full: uniform, every layer, in pieces of recompute_num_layers; block, that many layers of each stage only."""
    recompute_num_layers: int = 1
    """Layers; see recompute_method."""
    optimizer_offload_fraction: float = 0.0
    """Share of the optimizer's state that stands in host memory and is updated there. It needs
    use_distributed_optimizer, bf16, and a GPU with Transformer Engine."""

    def __post_init__(self) -> None:
        section = "parallelism"
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        positive(self, section, *sizes, "expert_model_parallel_size", "recompute_num_layers")
        if self.expert_tensor_parallel_size is not None:
            positive(self, section, "expert_tensor_parallel_size")
        virtual, pipeline = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_size
        key = f"{section}.virtual_pipeline_model_parallel_size"
        require(virtual is None or virtual > 1, key, virtual, "null or a number above 1")
        require(virtual is None or pipeline > 1, key, virtual, "null where pipeline_model_parallel_size is 1")
        split = self.tensor_model_parallel_size > 1
        _needs(self, "sequence_parallel", split, "tensor_model_parallel_size above 1")
        _needs(self, "overlap_param_gather", self.use_distributed_optimizer, "use_distributed_optimizer")
        _needs(self, "overlap_param_gather", self.overlap_grad_reduce, "overlap_grad_reduce")
        _needs(self, "optimizer_offload_fraction", self.use_distributed_optimizer, "use_distributed_optimizer")
        share(self, section, "optimizer_offload_fraction")
        if self.recompute_granularity is not None:
            one_of(f"{section}.recompute_granularity", self.recompute_granularity, ("full", "selective"))
        one_of(f"{section}.recompute_method", self.recompute_method, ("uniform", "block"))

    @property
    def model_ranks(self) -> int:
        """Processes that one copy of the model is on."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Processes that one copy of the experts is on."""
        tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return tensor * self.expert_model_parallel_size * self.pipeline_model_parallel_size


def _needs(config: ParallelismConfig, name: str, met: bool, what: str) -> None:
    value = getattr(config, name)
    require(met or not value, f"parallelism.{name}", value, f"{type(value)(0)} without {what}")
