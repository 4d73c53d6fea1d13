"""ED-GRPO as a policy loss of SkyRL: ``register_ed_grpo(cfg, ...)`` in your own script, before Ray starts.

SkyRL divides advantages by the mini-batch's counts and sums its losses, so that a loss sees no count. The term's
divisors are known in two of its reductions, ``sequence_mean`` and ``seq_mean_token_sum_norm``; others are refused.
"""

from dataclasses import dataclass, replace

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import (
    apply_off_policy_correction,
    off_policy_correction_enabled,
)
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, reduce_loss
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig
from torch import Tensor

from nemo_edo.adapters.exploration_settings import ExplorationSettings, warn_of_untested

LOSS = "ed_grpo"
UNCORRECTED = ("clip_cov", "importance_sampling", "kl_cov")


def register_ed_grpo(
    cfg: SkyRLTrainConfig, exploration_coefficient: float, log_ratio_floor: float | None = None
) -> None:
    """Registers ``cfg.trainer.algorithm.policy_loss_type`` plus the term as ``ed_grpo``, and selects it in ``cfg``.

    exploration_coefficient, log_ratio_floor: ``ExplorationSettings``.
    Raises ValueError for a reduction whose divisors a loss cannot know, a loss without log pi_old, or that an
    off-policy correction leaves alone, step-wise trajectories, and one optimizer step for each batch.
    """
    warn_of_untested("skyrl")
    exploration = ExplorationSettings(exploration_coefficient, log_ratio_floor)
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    known = ("sequence_mean", "seq_mean_token_sum_norm")
    if algorithm.loss_reduction not in known:
        raise ValueError(
            f"trainer.algorithm.loss_reduction is {algorithm.loss_reduction!r}: SkyRL shows its losses no count of the "
            f"mini-batch's tokens, so the term would have another divisor; set it to {' or '.join(known)}"
        )
    if algorithm.policy_loss_type in ("rollout_is", "dppo", "cross_entropy"):
        raise ValueError(
            f"trainer.algorithm.policy_loss_type is {algorithm.policy_loss_type!r}, for which SkyRL computes no log "
            "pi_old, which the term compares with; set it to regular, for example"
        )
    if algorithm.policy_loss_type in UNCORRECTED and off_policy_correction_enabled(algorithm.off_policy_correction):
        raise ValueError(
            f"trainer.algorithm.policy_loss_type is {algorithm.policy_loss_type!r}, which SkyRL does not correct by "
            "off_policy_correction, and the term would be: switch it off, or set regular, for example"
        )
    if cfg.generator.step_wise_trajectories:
        raise ValueError("generator.step_wise_trajectories=true: mini-batches vary in size, and the term's divisor too")
    exploration.require_several_steps(
        trainer.update_epochs_per_batch * trainer.train_batch_size / trainer.policy_mini_batch_size,
        f"Set trainer.policy_mini_batch_size (now {trainer.policy_mini_batch_size}) below trainer.train_batch_size "
        f"(now {trainer.train_batch_size}), or raise trainer.update_epochs_per_batch",
    )
    exploration.warn_of_cut_sampling(vars(cfg.generator.sampling_params), "generator.sampling_params.")
    sequences = trainer.policy_mini_batch_size * cfg.generator.n_samples_per_prompt
    base = algorithm.policy_loss_type
    PolicyLossRegistry.register(LOSS, EDGRPOPolicyLoss(exploration, base, sequences))
    algorithm.policy_loss_type = LOSS


@dataclass(frozen=True)
class EDGRPOPolicyLoss:
    """The policy loss that SkyRL's workers call for each micro-batch; they get it pickled, and need nemo_edo too."""

    exploration: ExplorationSettings
    base_loss: str
    sequences: int  # responses of a mini-batch, over all workers

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: AlgorithmConfig,
        loss_mask: Tensor,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The base loss with the term; with a coefficient of 0, the base loss to the last bit.

        Tensors are [B, T] over response tokens. SkyRL's off-policy correction weights and masks the term as it does the
        base loss. Metrics: the base loss's, ``exploration`` (mean over the micro-batch's tokens, in nats, floored,
        without the coefficient) and ``floor_share``.
        """
        loss, metrics = PolicyLossRegistry.get(self.base_loss)(
            log_probs,
            old_log_probs,
            advantages,
            config=replace(config, policy_loss_type=self.base_loss),
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
        )
        values_BT, sums = self.exploration.term(log_probs, old_log_probs, loss_mask)
        metrics |= self.exploration.metrics(sums)
        if self.exploration.coefficient == 0:
            return loss, metrics
        if config.loss_reduction == "sequence_mean":
            divisors_BT = self.sequences * loss_mask.sum(dim=-1, keepdim=True).clamp(min=1)
        else:
            divisors_BT = self.sequences * config.max_seq_len
        corrected_BT, mask_BT, _ = apply_off_policy_correction(
            values_BT / divisors_BT, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
        )
        return loss + self.exploration.coefficient * reduce_loss(corrected_BT, mask_BT), metrics
