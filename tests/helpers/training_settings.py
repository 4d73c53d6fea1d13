"""Settings of tiny training steps that are compared between layouts, and between devices."""

from dataclasses import replace

import torch
from helpers import tiny_models

from nemo_edo.config import GRPOConfig, IDPOConfig, LoRAConfig, OptimizerConfig, SFTConfig
from nemo_edo.types import TrainingBatch

TEMPERATURE = 0.7
# eps: well above rounding errors of gradients, which Adam would otherwise blow up to whole steps.
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, adam_eps=1e-3, clip_grad=0.5, warmup_steps=2)
SFT = SFTConfig(micro_batch_size=2, optimizer=OPTIMIZER)
GRPO = GRPOConfig(beta=0.04, alpha=0.0, micro_batch_size=2, optimizer=OPTIMIZER)
IDPO = IDPOConfig(beta=0.3, alpha=0.0, micro_batch_size=4, optimizer=OPTIMIZER)
EXPLORES = {"alpha": None, "exploration_coefficient": 0.3, "log_ratio_floor": -2.0}
ED_GRPO = replace(GRPO, **EXPLORES)
LORA = LoRAConfig(rank=4, alpha=12.0)


def as_pairs(rows: TrainingBatch) -> TrainingBatch:
    """Six rows as two pairs and two single responses, one of which does not explore."""
    factors = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    return rows.with_fields(pair_role=torch.tensor([1, -1, 0, 0, 1, -1]), exploration_factors=factors)


def random_pairs(seed: int) -> TrainingBatch:
    """Which two ranks share unevenly."""
    return as_pairs(tiny_models.random_batch(rows=6, seed=seed))
