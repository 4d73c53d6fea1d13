from __future__ import annotations

from torch import Tensor

from nemo_edo.config import IDPOConfig
from nemo_edo.losses import (
    LossTerm,
    ed_idpo_loss,
    exploration_term,
    kl_per_token,
    reduce_tokens,
    sampler_gap,
    sequence_logprobs,
)
from nemo_edo.models.megatron_gpt_exploring_model import MegatronGPTExploringModel
from nemo_edo.types import TrainingBatch


class MegatronGPTDPOModel(MegatronGPTExploringModel):
    """Iterative DPO (ETO), and ED-iDPO where ``cfg.training`` gives the exploration term a weight.

    A batch's rows 2k and 2k + 1 are a pair where ``pair_role`` says so. The exploration term runs over the rows with
    an exploration weight.
    """

    training_config = IDPOConfig

    def loss(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, *, exploration_weight: float | None = None
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        settings = self.settings
        policy_B = sequence_logprobs(logprobs, batch.mask, length_normalized=settings.length_normalized)
        ref_B = sequence_logprobs(batch.ref_logprobs, batch.mask, length_normalized=settings.length_normalized)
        chosen, rejected = batch.pair_role == 1, batch.pair_role == -1
        preference, exploration, metrics = ed_idpo_loss(
            policy_B[chosen],
            policy_B[rejected],
            ref_B[chosen],
            ref_B[rejected],
            *_explored(logprobs, batch),
            settings,
            exploration_weight=exploration_weight,
        )
        # In double, as a metric that overflows must not cost the step.
        kl = kl_per_token(logprobs.detach().double(), batch.ref_logprobs.double(), "k3")
        metrics |= {
            "entropy": reduce_tokens(entropies.detach(), batch.mask, "token-mean"),
            "kl": reduce_tokens(kl, batch.mask, "token-mean"),
        }
        if batch.sampler_logprobs is not None:
            metrics |= sampler_gap(batch.old_logprobs, batch.sampler_logprobs, batch.mask)
        return {"preference": preference, "exploration": exploration}, metrics

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        pairs = float((batch.pair_role == 1).sum())
        return {"preference": pairs, "exploration": self.exploration_count(batch)}

    def exploration(self, logprobs: Tensor, batch: TrainingBatch) -> LossTerm:
        settings = self.settings
        samples = _explored(logprobs, batch)
        if not len(samples[0]):
            return LossTerm(logprobs.sum() * 0.0, 0)
        reduction = "seq-mean-token-mean" if settings.length_normalized else "seq-sum"
        return exploration_term(*samples, reduction=reduction, log_ratio_floor=settings.log_ratio_floor)

    def exploration_count(self, batch: TrainingBatch) -> float:
        return float((batch.exploration_factors != 0).sum())


def _explored(logprobs: Tensor, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """log pi_theta, log pi_old and mask of the rows that the exploration term runs over."""
    rows = batch.exploration_factors != 0
    return logprobs[rows], batch.old_logprobs[rows], batch.mask[rows]
