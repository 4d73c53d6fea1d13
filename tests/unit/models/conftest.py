import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_edo.config import GRPOConfig, ParallelismConfig, PrecisionConfig, SFTConfig
from nemo_edo.models import MegatronGPTGRPOModel, MegatronGPTSFTModel
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel, model_config

HELPER = Path(__file__).parents[2] / "helpers" / "tiny_models.py"
TEMPERATURE = 0.7


@pytest.fixture(scope="session")
def tiny():
    """tests/helpers/tiny_models.py; tests are no package, hence not imported."""
    return SimpleNamespace(**runpy.run_path(str(HELPER)))


@pytest.fixture(scope="session")
def tiny_qwen2(tiny, tmp_path_factory) -> Path:
    return tiny.write_tiny_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def make_model(tiny_qwen2) -> Callable[[SFTConfig | GRPOConfig], MegatronGPTModel]:
    """The model class of a training config, with the tiny weights."""

    def make(training: SFTConfig | GRPOConfig) -> MegatronGPTModel:
        model_class = MegatronGPTSFTModel if isinstance(training, SFTConfig) else MegatronGPTGRPOModel
        settings = model_config(
            tiny_qwen2, parallelism=ParallelismConfig(), precision=PrecisionConfig(), seed=0, threads=1,
            training=training, temperature=TEMPERATURE,
        )
        return model_class(settings)

    return make
