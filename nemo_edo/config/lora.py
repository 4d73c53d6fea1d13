"""Low-rank adapters in place of full weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_edo.config.checks import one_of, positive, require

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class LoRAConfig:
    """LoRA (Hu et al. 2021), Megatron-Bridge's, for the warm-up and every arm. ``rank = 0`` trains all weights."""

    rank: int = 0
    """Of the adapters, a multiple of parallelism.tensor_model_parallel_size; 0: no adapters, all weights are
    trained."""
    alpha: float = 16.0
    """Adapters add alpha / rank times their product. Not the alpha of the exploration term."""
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    """The layers that get one, by Megatron's names: linear_qkv (queries, keys and values), linear_proj (attention's
    output), linear_fc1 (gate and up projections), linear_fc2 (the down projection)."""
    dropout: float = 0.0
    """Nothing but 0: with dropout, log-probabilities of one policy would differ from pass to pass, and old and
    reference log-probabilities would be noise."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "a number of at least 0")
        positive(self, "lora", "alpha")
        require(bool(self.targets), "lora.targets", self.targets, f"some of {', '.join(TARGETS)}")
        for target in self.targets:
            one_of("lora.targets", target, TARGETS)
        noise = "0: with dropout, old and reference log-probabilities would be noise"
        require(self.dropout == 0, "lora.dropout", self.dropout, noise)
