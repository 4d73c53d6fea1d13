"""ED-GRPO as a policy loss of verl: ``actor.policy_loss.loss_mode=ed_grpo``.

verl loads this module by the entry point ``verl.plugins`` whenever it is imported. The loss is one of verl's own
(``base_loss``) plus coefficient * E_old[log pi_theta - log pi_old], aggregated by verl's ``agg_loss`` like all its
terms. ``algorithm.adv_estimator=ed_group`` gives ``group_advantages``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import (
    POLICY_LOSS_REGISTRY,
    agg_loss,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from verl.utils import config as verl_config
from verl.workers.config import ActorConfig, PolicyLossConfig

from nemo_edo.adapters.exploration_settings import ExplorationSettings, warn_of_untested
from nemo_edo.losses import group_advantages

LOSS_MODE = "ed_grpo"


@dataclass
class EDGRPOPolicyLossConfig(PolicyLossConfig):
    """The settings, as ``actor_rollout_ref.actor.policy_loss._target_``; verl's own stay where they are.

    Raises ValueError for another ``loss_mode``, with which verl would train without the term, a missing coefficient,
    values that ``ExplorationSettings`` refuses, and a ``base_loss`` that verl does not have or that is this very loss.
    """

    loss_mode: str = LOSS_MODE
    exploration_coefficient: float | None = None
    """Must be given; it has a default only because the fields before it have."""
    log_ratio_floor: float | None = None
    base_loss: str = "vanilla"
    """The policy loss of verl's that the term is added to."""

    def __post_init__(self) -> None:
        warn_of_untested("verl")
        if self.loss_mode != LOSS_MODE:
            raise ValueError(
                f"policy_loss.loss_mode is {self.loss_mode!r}, which has no exploration term: set it to {LOSS_MODE}, "
                f"and base_loss to {self.loss_mode}; or leave out _target_ and the settings of the term"
            )
        self.exploration()
        if self.base_loss == LOSS_MODE or self.base_loss not in POLICY_LOSS_REGISTRY:
            known = ", ".join(name for name in POLICY_LOSS_REGISTRY if name != LOSS_MODE)
            raise ValueError(f"policy_loss.base_loss is {self.base_loss!r}, expected one of verl's losses: {known}")
        correction = getattr(self, "rollout_correction", None)
        if self.base_loss == "bypass_mode" and correction is not None and correction.get("rollout_rs"):
            raise ValueError(
                "policy_loss.base_loss is bypass_mode, which rejects tokens by rollout_rs that the term would push: "
                "unset rollout_rs, or take decoupled rollout correction with another base_loss"
            )

    def exploration(self) -> ExplorationSettings:
        if self.exploration_coefficient is None:
            raise ValueError(f"policy_loss.exploration_coefficient is missing: set it with loss_mode={LOSS_MODE}")
        return ExplorationSettings(self.exploration_coefficient, self.log_ratio_floor)


@register_policy_loss(LOSS_MODE)
def ed_grpo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The base loss plus the weighted term; with a coefficient of 0, the base loss to the last bit.

    Tensors are [B, T] over response tokens. verl's rollout correction weights the term as it weights the base loss.
    Metrics: the base loss's, ``actor/exploration`` (mean over the micro-batch's tokens, in nats, floored, without the
    coefficient) and ``actor/floor_share``.
    """
    assert config is not None, "verl calls its policy losses with the actor's config"
    settings = _settings(config)
    exploration = settings.exploration()
    loss, metrics = get_policy_loss_fn(settings.base_loss)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    values_BT, sums = exploration.term(log_prob, old_log_prob, response_mask, rollout_is_weights)
    metrics |= {f"actor/{name}": value for name, value in exploration.metrics(sums).items()}
    if exploration.coefficient != 0:
        term = agg_loss(values_BT, response_mask, loss_agg_mode, **config.global_batch_info)
        loss = loss + exploration.coefficient * term
    return loss, metrics


@register_adv_est("ed_group")
def group_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: AlgoConfig | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """``group_advantages`` of the summed rewards, [B, T] twice, as verl's estimators return them.

    index: [B] group ids of any kind; verl's are strings. The deviation is the sample's, as in verl's ``grpo``
    estimator. Unlike there, equal rewards give exact zeros, and so does a group of one (verl: its reward).
    """
    scaled = config is None or config.get("norm_adv_by_std_in_grpo", True)
    advantages_B = group_advantages(
        token_level_rewards.sum(dim=-1), index, scale="std" if scaled else "none", deviation="sample", singletons="zero"
    )
    advantages_BT = advantages_B[:, None] * response_mask
    return advantages_BT, advantages_BT


def _settings(actor: ActorConfig) -> EDGRPOPolicyLossConfig:
    if not isinstance(actor.policy_loss, EDGRPOPolicyLossConfig):
        raise ValueError(
            f"loss_mode is {LOSS_MODE!r}, but its settings are missing: set actor_rollout_ref.actor.policy_loss."
            f"_target_ to {EDGRPOPolicyLossConfig.__module__}.{EDGRPOPolicyLossConfig.__name__}"
        )
    return actor.policy_loss


_validate_actor = ActorConfig.validate


def _validate_actor_and_schedule(
    self: ActorConfig, n_gpus: int, train_batch_size: int, model_config: dict | None = None
) -> None:
    """verl's own validation of the actor, the only place that sees the batch size too, then that of the schedule."""
    _validate_actor(self, n_gpus, train_batch_size, model_config)
    if self.policy_loss.loss_mode == LOSS_MODE:
        _settings(self).exploration().require_several_steps(
            self.ppo_epochs * train_batch_size / self.ppo_mini_batch_size,
            f"Set actor_rollout_ref.actor.ppo_mini_batch_size (now {self.ppo_mini_batch_size}) below "
            f"data.train_batch_size (now {train_batch_size}), or raise actor_rollout_ref.actor.ppo_epochs "
            f"(now {self.ppo_epochs})",
        )


ActorConfig.validate = _validate_actor_and_schedule

_validate_config = verl_config.validate_config


def _validate_config_and_sampling(config: DictConfig, *args: Any, **kwargs: Any) -> None:
    """verl's own validation, the first thing its trainers do, then a warning for responses of a cut distribution."""
    _validate_config(config, *args, **kwargs)
    rollout, policy_loss = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.policy_loss
    if policy_loss.loss_mode == LOSS_MODE:
        settings = ExplorationSettings(policy_loss.exploration_coefficient, policy_loss.get("log_ratio_floor"))
        settings.warn_of_cut_sampling(rollout, "rollout.")


verl_config.validate_config = _validate_config_and_sampling
