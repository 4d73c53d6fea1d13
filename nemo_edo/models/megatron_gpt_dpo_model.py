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
from nemo_edo.megatron.forward_backward import Terms
from nemo_edo.models.megatron_gpt_exploring_model import MegatronGPTExploringModel
from nemo_edo.types import TrainingBatch


class MegatronGPTDPOModel(MegatronGPTExploringModel):
    """Iterative DPO (ETO), and ED-iDPO where ``cfg.training`` gives the exploration term a weight.

    A batch's rows 2k and 2k + 1 are a pair where ``pair_role`` says so. The exploration term runs over the rows with
    an exploration weight.
    """

    training_config = IDPOConfig

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        settings = self.settings
        policy_B = sequence_logprobs(logprobs, batch.mask, length_normalized=settings.length_normalized)
        ref_B = sequence_logprobs(batch.ref_logprobs, batch.mask, length_normalized=settings.length_normalized)
        # All rows in pairs, and a mask: to index by a boolean tensor would wait for the device.
        preference, exploration, metrics = ed_idpo_loss(
            policy_B[0::2],
            policy_B[1::2],
            ref_B[0::2],
            ref_B[1::2],
            logprobs,
            batch.old_logprobs,
            _explored(batch),
            settings,
            pair_mask=batch.pair_role[0::2] == 1,
            exploration_weight=exploration_weight,
            on_empty="zero",
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
        return exploration_term(
            logprobs,
            batch.old_logprobs,
            _explored(batch),
            reduction="seq-mean-token-mean" if settings.length_normalized else "seq-sum",
            log_ratio_floor=settings.log_ratio_floor,
            on_empty="zero",
        )

    def exploration_count(self, batch: TrainingBatch) -> float:
        return float((batch.exploration_factors != 0).sum())


def _explored(batch: TrainingBatch) -> Tensor:
    """[B, T], 1 at the tokens that the exploration term runs over."""
    return batch.mask * (batch.exploration_factors != 0)[:, None]
