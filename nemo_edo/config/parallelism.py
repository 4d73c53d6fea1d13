"""The sections of a config that say how a model is split over processes, and in which numbers it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from nemo_edo.config.checks import one_of, positive, require, share

FP8_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


@dataclass
class PrecisionConfig:
    dtype: str = "fp32"
    """fp32, or bf16 with fp32 main weights. Log-probabilities and losses are fp32 in both."""
    fp8: Optional[str] = None
    """Number format of the layers' matrix products: hybrid, e4m3 forward and e5m2 for gradients; e4m3 for both; null:
    that of ``dtype``. It needs dtype bf16, Transformer Engine and a GPU that has them."""
    fp8_recipe: str = "tensorwise"
    """How tensors are scaled into FP8's range: tensorwise, each by its own maximum; delayed, by maxima of steps
    before; blockwise, in blocks of 128; mxfp8, in blocks of 32 (Blackwell)."""
    fp8_margin: int = 0
    """With recipe delayed: scales are smaller by 2^margin."""
    fp8_amax_history_len: int = 1024
    """With recipe delayed: steps that the maximum is taken over."""
    fp8_param_gather: bool = False
    """Weights are kept, and gathered from the distributed optimizer, in FP8."""
    bf16_layers_at_start: int = 0
    """Number of first layers that still compute in bf16."""
    bf16_layers_at_end: int = 0
    """Number of last layers that still compute in bf16."""

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
    """Megatron's splits, and what else decides how much of a model is on a process. The data-parallel size is what
    remains of the world."""

    tensor_model_parallel_size: Optional[int] = 1
    """Processes that share each layer. null: as few as the model fits on by the doctor's estimate, usually one; where
    several share it, sequence_parallel is on. The command finds it by the number of processes (parallelism=auto)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages: groups of layers, each on separate processes."""
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
    """Data-parallel processes over which the experts of a mixture-of-experts model are split."""
    expert_tensor_parallel_size: Optional[int] = None
    """Processes that share each expert. null: tensor_model_parallel_size."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks during the backward pass."""
    overlap_param_gather: bool = False
    """Gather the weights that the distributed optimizer has changed during the next forward pass."""
    recompute_granularity: Optional[str] = None
    """Activations computed again in the backward pass rather than kept: full, of whole layers; selective, of the
    attention's core. null: none."""
    recompute_method: str = "uniform"
    """With full: uniform, every layer, in pieces of recompute_num_layers; block, that many layers of each stage
    only."""
    recompute_num_layers: int = 1
    """Layers; see recompute_method."""
    optimizer_offload_fraction: float = 0.0
    """Share of the optimizer's state that is kept and updated in host memory. It needs
    use_distributed_optimizer, bf16, and a GPU with Transformer Engine."""

    def __post_init__(self) -> None:
        section = "parallelism"
        sizes = ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
        positive(self, section, *sizes, "recompute_num_layers")
        for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(self, name) is not None:
                positive(self, section, name)
        virtual, pipeline = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_size
        key = f"{section}.virtual_pipeline_model_parallel_size"
        require(virtual is None or virtual > 1, key, virtual, "null or a number above 1")
        require(virtual is None or pipeline > 1, key, virtual, "null where pipeline_model_parallel_size is 1")
        split = self.tensor_model_parallel_size != 1
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


TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class LoRAConfig:
    """LoRA (Hu et al. 2021), Megatron-Bridge's, for the warm-up and every arm. ``rank = 0`` trains all weights."""

    rank: int = 0
    """Rank of the adapters, a multiple of parallelism.tensor_model_parallel_size; 0: no adapters, all weights are
    trained."""
    alpha: float = 16.0
    """Adapters add alpha / rank times their product. Not the alpha of the exploration term."""
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    """The layers with adapters, by Megatron's names: linear_qkv (queries, keys and values), linear_proj (attention's
    output), linear_fc1 (gate and up projections), linear_fc2 (the down projection)."""
    dropout: float = 0.0
    """Must be 0: with dropout, log-probabilities of one policy would differ from pass to pass, and old and
    reference log-probabilities would be noise."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "a number of at least 0")
        positive(self, "lora", "alpha")
        require(bool(self.targets), "lora.targets", self.targets, f"some of {', '.join(TARGETS)}")
        for target in self.targets:
            one_of("lora.targets", target, TARGETS)
        noise = "0: with dropout, old and reference log-probabilities would be noise"
        require(self.dropout == 0, "lora.dropout", self.dropout, noise)
