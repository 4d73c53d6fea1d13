"""Every setting and its default: the only home of defaults.

Hydra composes the files of ``conf/`` over these dataclasses (``nemo_edo.configuration``); the files hold differences
only. Checks that need no files, weights or devices stand in ``__post_init__`` and name the key as a user writes it.
"""

from nemo_edo.config.losses import AGGREGATIONS, DPOLossConfig, GRPOLossConfig, ScheduleConfig
from nemo_edo.config.run import (
    ArithmeticConfig,
    DataConfig,
    EvaluationConfig,
    GenerationConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    PrecisionConfig,
    RunConfig,
    SamplingConfig,
    SFTConfig,
)

__all__ = [
    "AGGREGATIONS",
    "ArithmeticConfig",
    "DPOLossConfig",
    "DataConfig",
    "EvaluationConfig",
    "GRPOConfig",
    "GRPOLossConfig",
    "GenerationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "PrecisionConfig",
    "RunConfig",
    "SFTConfig",
    "SamplingConfig",
    "ScheduleConfig",
]
