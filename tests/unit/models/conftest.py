from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.tiny_models import over

from nemo_edo.config import (
    GRPOConfig,
    IDPOConfig,
    LoRAConfig,
    OptimizerConfig,
    ParallelismConfig,
    PrecisionConfig,
    SFTConfig,
)
from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel, model_config
from nemo_edo.types import TrainingBatch

TEMPERATURE = 0.7
SETTINGS = {"micro_batch_size": 2, "optimizer": OptimizerConfig(lr=1e-3)}


@pytest.fixture(scope="module", ids=lambda training: type(training).__name__, params=[
    SFTConfig(**SETTINGS), GRPOConfig(**SETTINGS, alpha=0.25, clip_high=0.28),
    IDPOConfig(**SETTINGS, alpha=0.25, length_normalized=True),
])
def training(request) -> SFTConfig | GRPOConfig | IDPOConfig:
    """Of each model class."""
    return request.param


@pytest.fixture(scope="session")
def as_collected():
    """as_collected(model, batch): with the trainer's own log-probabilities before the first step, as an iteration has
    them."""

    def collect(model, batch):
        model.freeze_reference()
        policy = over(model)
        return replace(batch, old_logprobs=policy.logprobs(batch)[0], ref_logprobs=policy.reference_logprobs(batch))

    return collect


@pytest.fixture(scope="session")
def pairs(tiny) -> TrainingBatch:
    """Eight rows: two pairs, and four single responses. A response of a pair and a single one do not explore, and the
    last row is padding."""
    batch = tiny.random_batch(rows=8)
    batch.mask[7] = 0.0
    return batch.with_fields(
        pair_role=torch.tensor([1, -1, 0, 0, 1, -1, 0, 0]),
        exploration_factors=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]),
    )


@pytest.fixture(scope="session")
def make_model(tiny_qwen2) -> Callable[..., MegatronGPTModel]:
    """The model class of a training config, with the tiny weights."""

    def make(
        training: SFTConfig | GRPOConfig | IDPOConfig, lora: LoRAConfig | None = None, dtype: str = "fp32"
    ) -> MegatronGPTModel:
        classes = {SFTConfig: MegatronGPTSFTModel, GRPOConfig: MegatronGPTGRPOModel, IDPOConfig: MegatronGPTDPOModel}
        settings = model_config(
            tiny_qwen2, parallelism=ParallelismConfig(), precision=PrecisionConfig(dtype), seed=0, threads=1,
            lora=lora, training=training, temperature=TEMPERATURE,
        )
        return classes[type(training)](settings)

    return make
