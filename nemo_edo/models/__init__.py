"""Model classes on NeMo's ModelPT, with NeMo-Aligner's interface."""

from nemo_edo.models.megatron_gpt_exploring_model import MegatronGPTDPOModel, MegatronGPTGRPOModel
from nemo_edo.models.megatron_gpt_model import MegatronGPTSFTModel

__all__ = ["MegatronGPTDPOModel", "MegatronGPTGRPOModel", "MegatronGPTSFTModel"]
