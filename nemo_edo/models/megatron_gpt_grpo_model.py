from __future__ import annotations

from torch import Tensor

from nemo_edo.config import GRPOConfig
from nemo_edo.losses import (
    LossTerm,
    entropy_bonus,
    floor_share,
    grpo_exploration,
    grpo_loss,
    reduce_tokens,
    reduction_count,
)
from nemo_edo.megatron.forward_backward import Terms
from nemo_edo.models.megatron_gpt_exploring_model import MegatronGPTExploringModel
from nemo_edo.types import TrainingBatch


class MegatronGPTGRPOModel(MegatronGPTExploringModel):
    """GRPO, and ED-GRPO where ``cfg.training`` gives the exploration term a weight."""

    training_config = GRPOConfig

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        """See the base class. Where the batch has responses of an older policy, the exploration term is one over them,
        with a separate count."""
        settings, mask, explores_own = self.settings, batch.own.mask, batch.older is None
        term, metrics = grpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.advantages,
            mask,
            settings,
            sampler_logprobs=batch.sampler_logprobs,
            exploration_factors=batch.exploration_factors,
            selected=batch.selected,
            exploration_weight=exploration_weight if explores_own else 0.0,
            on_empty="zero",
        )
        if settings.entropy_coefficient:
            bonus = entropy_bonus(
                entropies, mask, reduction=settings.aggregation, norm_length=settings.norm_length, on_empty="zero"
            )
            term = term.plus(bonus, settings.entropy_coefficient)
        metrics["entropy"] = reduce_tokens(entropies.detach(), mask, "token-mean", on_empty="zero")
        terms = {"grpo": term}
        if not explores_own:
            exploration, floored = self.exploration(logprobs, batch), settings.log_ratio_floor
            terms["exploration"] = exploration.scaled(exploration_weight)
            metrics["exploration"] = exploration.detached()
            metrics["floor_fraction"] = floor_share(logprobs, batch.old_logprobs, batch.explored.mask, floored)
        return terms, metrics

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        own = {"grpo": self._count(batch.own)}
        return own if batch.older is None else {**own, "exploration": self.exploration_count(batch)}

    def exploration(self, logprobs: Tensor, batch: TrainingBatch) -> LossTerm:
        return grpo_exploration(
            logprobs,
            batch.old_logprobs,
            batch.explored.mask,
            self.settings,
            sampler_logprobs=batch.sampler_logprobs,
            exploration_factors=batch.exploration_factors,
            on_empty="zero",
        )

    def exploration_count(self, batch: TrainingBatch) -> float:
        return self._count(batch.explored)

    def _count(self, batch: TrainingBatch) -> float:
        return float(reduction_count(batch.mask, self.settings.aggregation))
