from __future__ import annotations

from torch import Tensor

from nemo_edo.config import SFTConfig
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron.forward_backward import Terms
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.types import TrainingBatch


class MegatronGPTSFTModel(MegatronGPTModel):
    """Supervised fine-tuning: the negative log-likelihood of response tokens, a mean over tokens."""

    training_config = SFTConfig

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        """See the base class; nothing explores."""
        return {"sft": sft_loss(logprobs, batch.mask)}, {}

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        return {"sft": float(reduction_count(batch.mask, "token-mean"))}
