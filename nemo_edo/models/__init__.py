"""Model classes on NeMo's ModelPT, with NeMo-Aligner's interface."""

from nemo_edo.models.megatron_gpt_dpo_model import MegatronGPTDPOModel
from nemo_edo.models.megatron_gpt_grpo_model import MegatronGPTGRPOModel
from nemo_edo.models.megatron_gpt_sft_model import MegatronGPTSFTModel

__all__ = ["MegatronGPTDPOModel", "MegatronGPTGRPOModel", "MegatronGPTSFTModel"]
