from __future__ import annotations

from torch import Tensor

from nemo_edo.config import GRPOConfig
from nemo_edo.losses import LossTerm, entropy_bonus, grpo_exploration, grpo_loss, reduce_tokens, reduction_count
from nemo_edo.models.megatron_gpt_exploring_model import MegatronGPTExploringModel
from nemo_edo.types import TrainingBatch


class MegatronGPTGRPOModel(MegatronGPTExploringModel):
    """GRPO, and ED-GRPO where ``cfg.training`` gives the exploration term a weight."""

    training_config = GRPOConfig

    def loss(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, *, exploration_weight: float | None = None
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        settings = self.settings
        term, metrics = grpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.advantages,
            batch.mask,
            settings,
            sampler_logprobs=batch.sampler_logprobs,
            exploration_factors=batch.exploration_factors,
            selected=batch.selected,
            exploration_weight=exploration_weight,
        )
        if settings.entropy_coefficient:
            bonus = entropy_bonus(
                entropies, batch.mask, reduction=settings.aggregation, norm_length=settings.norm_length
            )
            term = term.plus(bonus, settings.entropy_coefficient)
        return {"grpo": term}, {**metrics, "entropy": reduce_tokens(entropies.detach(), batch.mask, "token-mean")}

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        return {"grpo": self.exploration_count(batch)}

    def exploration(self, logprobs: Tensor, batch: TrainingBatch) -> LossTerm:
        return grpo_exploration(
            logprobs,
            batch.old_logprobs,
            batch.mask,
            self.settings,
            sampler_logprobs=batch.sampler_logprobs,
            exploration_factors=batch.exploration_factors,
        )

    def exploration_count(self, batch: TrainingBatch) -> float:
        return float(reduction_count(batch.mask, self.settings.aggregation))
