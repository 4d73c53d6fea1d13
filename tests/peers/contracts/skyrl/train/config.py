from dataclasses import dataclass
from typing import Any


@dataclass
class AlgorithmConfig:
    policy_loss_type: str = "regular"
    loss_reduction: str = "token_mean"
    max_seq_len: int | None = None
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    off_policy_correction: Any = None


@dataclass
class SkyRLTrainConfig:
    trainer: Any
    generator: Any
