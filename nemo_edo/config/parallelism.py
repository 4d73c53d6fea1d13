"""The sections of a config that say how a model is split over processes, and in which numbers it computes."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_edo.config.checks import one_of, positive


@dataclass
class PrecisionConfig:
    dtype: str = "fp32"
    """fp32, or bf16 with fp32 main weights. Log-probabilities and losses are fp32 in both."""

    def __post_init__(self) -> None:
        one_of("precision.dtype", self.dtype, ("fp32", "bf16"))


@dataclass
class ParallelismConfig:
    """Megatron's splits. The data-parallel size is what remains of the world."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Groups of layers, each on processes of its own."""
    use_distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""

    def __post_init__(self) -> None:
        positive(self, "parallelism", "tensor_model_parallel_size", "pipeline_model_parallel_size")
