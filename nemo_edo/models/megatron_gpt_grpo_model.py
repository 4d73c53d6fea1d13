from __future__ import annotations

from torch import Tensor

from nemo_edo.config import GRPOConfig
from nemo_edo.losses import LossTerm, entropy_bonus, grpo_loss, reduce_tokens, reduction_count
from nemo_edo.megatron.policy import Weights
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.types import TrainingBatch


class MegatronGPTGRPOModel(MegatronGPTModel):
    """GRPO, and ED-GRPO where ``cfg.training`` gives the exploration term a weight."""

    training_config = GRPOConfig
    reference: Weights | None = None

    def freeze_reference(self) -> None:
        """The current weights become the centre of the trust region."""
        self.reference = self.policy.snapshot()

    def reference_log_probs(self, batch: TrainingBatch) -> Tensor:
        """[B, T] log-probabilities under the frozen reference: ``interfaces.Policy``."""
        if self.reference is None:
            raise RuntimeError("no reference policy: call freeze_reference() before training")
        with self.policy.weights(self.reference):
            return self.log_probs(batch)[0]

    def loss(self, log_probs: Tensor, entropies: Tensor, batch: TrainingBatch) -> tuple[LossTerm, dict[str, LossTerm]]:
        settings = self.settings
        term, metrics = grpo_loss(
            log_probs, batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.mask, settings
        )
        if settings.entropy_coefficient:
            bonus = entropy_bonus(
                entropies, batch.mask, reduction=settings.aggregation, norm_length=settings.norm_length
            )
            term = term.plus(bonus, settings.entropy_coefficient)
        return term, {**metrics, "entropy": reduce_tokens(entropies.detach(), batch.mask, "token-mean")}

    def loss_count(self, batch: TrainingBatch) -> float:
        return float(reduction_count(batch.mask, self.settings.aggregation))
