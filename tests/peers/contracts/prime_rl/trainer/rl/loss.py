from dataclasses import dataclass

from torch import Tensor


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def default_loss_fn(inputs: LossInputs, loss_config) -> LossOutputs:
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    values = -loss_config.adv_tau * inputs.advantages * log_ratio.exp() + loss_config.kl_tau * log_ratio**2
    values = values * inputs.loss_mask * (1.0 if inputs.loss_weights is None else inputs.loss_weights)
    return LossOutputs(loss=values.sum(), metrics={"is_masked": values.new_zeros(())})
