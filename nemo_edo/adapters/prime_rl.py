"""ED-GRPO as a custom loss of prime-rl: ``[trainer.loss] type = "custom"``, ``import_path`` this function.

prime-rl calls it for each packed sequence and divides the sum over all of them by the step's number of tokens.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs, default_loss_fn

from nemo_edo.adapters.exploration_settings import ExplorationSettings, warn_of_untested

STALENESS = (
    "prime-rl takes one optimizer step for each batch: the exploration term is zero-mean noise on samples of the "
    "current weights. Keep orchestrator.max_off_policy_steps above 0, and watch off_policy/* for samples that are "
    "older. Set orchestrator.train.filter_zero_advantages=false: by default groups of equal rewards do not reach it"
)


def ed_grpo(
    inputs: LossInputs,
    *,
    exploration_coefficient: float,
    log_ratio_floor: float | None = None,
    default_loss: Mapping[str, Any] | None = None,
) -> LossOutputs:
    """prime-rl's default loss plus coefficient * (log pi_theta - log pi_old), summed over a sequence's tokens.

    inputs: [T] of one sequence. pi_old is the policy that sampled it (``inference_logprobs``); its tokens have
        ``loss_weights``, as in the default loss. With a coefficient of 0 the loss is the default to the last bit.
    default_loss: settings of ``DefaultLossConfig``, which a custom loss takes out of the config.
    Warns, once, that the term needs samples older than the weights: the schedule is not to be seen from here.
    Metrics: the default's, ``exploration`` (mean over tokens, in nats, floored, without the coefficient), and
    ``floor_share``; prime-rl averages them over sequences.
    """
    warn_of_untested("prime-rl")
    exploration = ExplorationSettings(exploration_coefficient, log_ratio_floor)
    outputs = default_loss_fn(inputs, DefaultLossConfig(**(default_loss or {})))
    one_row = inputs.trainer_logprobs[None], inputs.inference_logprobs[None], inputs.loss_mask[None]
    weights = None if inputs.loss_weights is None else inputs.loss_weights[None]
    values_BT, (total, below, tokens) = exploration.term(*one_row, weights)
    tokens = tokens.clamp(min=1)
    metrics = {**outputs.metrics, "exploration": total / tokens, "floor_share": below / tokens}
    loss = outputs.loss
    if exploration.coefficient != 0:
        warnings.warn(STALENESS, stacklevel=2)
        loss = loss + exploration.coefficient * values_BT.sum()
    return LossOutputs(loss=loss, metrics=metrics)
