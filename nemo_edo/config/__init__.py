"""Every setting and its default: the only home of defaults.

Hydra composes the files of ``conf/`` over these dataclasses (``nemo_edo.configuration``); the files hold differences
only. Checks that need no files, weights or devices stand in ``__post_init__`` and name the key as a user writes it.
"""

from nemo_edo.config.cluster import ClusterConfig, ContainerConfig
from nemo_edo.config.data import ArithmeticConfig, DataConfig, RewardsConfig
from nemo_edo.config.generation import GenerationConfig, ServersConfig
from nemo_edo.config.guards import BoundsConfig, GuardsConfig
from nemo_edo.config.judge import JudgeConfig
from nemo_edo.config.lora import LoRAConfig
from nemo_edo.config.losses import AGGREGATIONS, DPOLossConfig, GRPOLossConfig, ScheduleConfig
from nemo_edo.config.parallelism import ParallelismConfig, PrecisionConfig
from nemo_edo.config.refit import RefitConfig
from nemo_edo.config.reward_model import (
    RewardBaseConfig,
    RewardDataConfig,
    RewardModelRunConfig,
    RewardTrainConfig,
    ScoreConfig,
)
from nemo_edo.config.run import (
    ALGORITHMS,
    FUSED_FROM_COLUMNS,
    NONE,
    SFT,
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from nemo_edo.config.search import SearchLLMConfig
from nemo_edo.config.training import GRPOConfig, IDPOConfig, LoopConfig, MicroBatchConfig, OptimizerConfig, SFTConfig

__all__ = [
    "AGGREGATIONS",
    "ALGORITHMS",
    "ArithmeticConfig",
    "BoundsConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "ContainerConfig",
    "DPOLossConfig",
    "DataConfig",
    "EvaluationConfig",
    "FUSED_FROM_COLUMNS",
    "GRPOConfig",
    "GRPOLossConfig",
    "GenerationConfig",
    "GuardsConfig",
    "IDPOConfig",
    "JudgeConfig",
    "LoRAConfig",
    "LoopConfig",
    "MicroBatchConfig",
    "ModelConfig",
    "NONE",
    "OptimizerConfig",
    "ParallelismConfig",
    "PrecisionConfig",
    "RefitConfig",
    "RewardBaseConfig",
    "RewardDataConfig",
    "RewardModelRunConfig",
    "RewardTrainConfig",
    "RewardsConfig",
    "RunConfig",
    "SFT",
    "SFTConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "ScoreConfig",
    "SearchLLMConfig",
    "ServersConfig",
    "TrainConfig",
]
