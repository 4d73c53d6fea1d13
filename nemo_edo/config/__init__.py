"""Every setting and its default: the only home of defaults. ``config.compose`` composes the files of ``conf/`` by Hydra
(``config.hydra``) and checks them against these dataclasses; the files have differences only. Checks that need no
files, weights or devices are in ``__post_init__`` and name the key as a user writes it."""

from nemo_edo.config.data import ArithmeticConfig, Columns, DataConfig, JudgeConfig, RewardsConfig
from nemo_edo.config.generation import GenerationConfig, RefitConfig, ServersConfig
from nemo_edo.config.losses import AGGREGATIONS, DPOLossConfig, GRPOLossConfig, ScheduleConfig
from nemo_edo.config.parallelism import ClusterConfig, ContainerConfig, LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.reward_model import (
    RewardBaseConfig,
    RewardDataConfig,
    RewardModelRunConfig,
    RewardTrainConfig,
    ScoreConfig,
    SearchConfig,
    SearchLLMConfig,
)
from nemo_edo.config.run import (
    ALGORITHMS,
    FUSED_FROM_LOGITS,
    NONE,
    SFT,
    CheckpointConfig,
    EarlyStopConfig,
    EvaluationConfig,
    ModelConfig,
    ProfileConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from nemo_edo.config.training import (
    ArmConfig,
    BoundsConfig,
    GRPOConfig,
    GuardsConfig,
    IDPOConfig,
    LoopConfig,
    MicroBatchConfig,
    OptimizerConfig,
    SFTConfig,
)
