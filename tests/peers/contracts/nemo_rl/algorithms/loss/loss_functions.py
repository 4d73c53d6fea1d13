"""A plain policy gradient in NeMo-RL's conventions: its settings' names, masks, counts and importance weights."""

from typing import Any

from pydantic import BaseModel

from nemo_rl.algorithms.loss.interfaces import LossType
from nemo_rl.algorithms.utils import masked_mean


class ClippedPGLossConfig(BaseModel, extra="allow"):
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    reference_policy_kl_penalty: float = 0.01
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    force_on_policy_ratio: bool = False


class ClippedPGLossFn:
    def __init__(self, cfg: ClippedPGLossConfig, use_fused_linear_logprobs: bool = False):
        for name in type(cfg).model_fields:
            setattr(self, name, getattr(cfg, name))
        self.loss_type = LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.metric_normalizations: dict[str, Any] = {"probs_ratio": "tokens"}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        mask = token_mask * sample_mask[:, None]
        advantages, generated = data["advantages"][:, 1:], data["generation_logprobs"][:, 1:]
        old = next_token_logprobs.detach() if self.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        values = -advantages * (next_token_logprobs - old).exp()
        if self.use_importance_sampling_correction:
            values = values * self._bounded_weights(old - generated, mask, token_mask)
        if self.loss_type == LossType.TOKEN_LEVEL:
            loss = masked_mean(values, mask, global_normalization_factor=global_valid_toks)
        else:
            loss = masked_mean(masked_mean(values, token_mask, dim=-1), sample_mask,
                               global_normalization_factor=global_valid_seqs)  # fmt: skip
        return loss, {"loss": loss.item(), "probs_ratio": 1.0}

    def _bounded_weights(self, log_ratio, mask, token_mask):
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if self.sequence_level_importance_ratios:
            log_ratio = (log_ratio * mask).sum(-1, keepdim=True).expand_as(log_ratio)
        weights = log_ratio.exp()
        match self.truncated_importance_sampling_type:
            case "tis":
                return weights.clamp(low or 0.0, high)
            case "icepop":
                return weights * ((weights >= low) & (weights <= high))
            case "seq-mask-tis":
                mean = masked_mean(log_ratio, token_mask, dim=-1).exp()
                return weights * ((mean >= low) & (mean <= high))[:, None]
        return weights
