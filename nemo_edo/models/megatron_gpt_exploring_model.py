from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor

from nemo_edo.data.shares import Share
from nemo_edo.losses import LossTerm, token_spread
from nemo_edo.megatron.forward_backward import LossFunction, Terms, forward_backward
from nemo_edo.megatron.policy import Weights
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.types import TrainingBatch


class MegatronGPTExploringModel(MegatronGPTModel):
    """What ED-GRPO and ED-iDPO share: a frozen reference, and a loss with an exploration term."""

    measures_tokens = True
    reference: Weights | None = None
    """A copy of its weights, where one is needed."""
    _has_reference = False

    def token_metrics(self, batch: TrainingBatch, logprobs: Tensor, entropies: Tensor) -> dict[str, float]:
        """How far the policy is from the one that sampled the batch's tokens, and how its entropies spread."""
        return token_spread(logprobs, entropies, old_logprobs=batch.old_logprobs, mask=batch.own.mask)

    # --- the exploration term --------------------------------------------------------------------------------------

    @abstractmethod
    def exploration(self, logprobs: Tensor, batch: TrainingBatch) -> LossTerm:
        """The exploration term of a micro-batch, at weight 1."""

    @abstractmethod
    def exploration_count(self, batch: TrainingBatch) -> float:
        """Its count over a whole global batch."""

    def exploration_gradient_ratio(self, share: Share, exploration_count: float) -> float:
        """Norm of the exploration term's gradient at weight 1 over that of the rest of the loss, of a global batch of
        which each rank has its share. inf where the rest has no gradient, 0 where neither has one."""
        task = self._gradient_norm(share, self.loss, exploration_weight=0.0)
        alone = replace(share, loss_counts={"exploration": exploration_count})
        exploration = self._gradient_norm(alone, self.exploration_alone, exploration_weight=1.0)
        if task == 0:
            return float("inf") if exploration > 0 else 0.0
        return exploration / task

    def exploration_alone(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float
    ) -> Terms:
        """The exploration term as a loss."""
        return {"exploration": self.exploration(logprobs, batch).scaled(exploration_weight)}, {}

    def _gradient_norm(self, share: Share, loss: LossFunction, exploration_weight: float) -> float:
        self.prepare_for_training_step()
        forward_backward(self.policy, share, loss, exploration_weight=exploration_weight, temperature=self.temperature)
        norm = self.policy.gradient_norm()
        self.policy.zero_grad()
        return norm

    # --- the reference ---------------------------------------------------------------------------------------------

    def freeze_reference(self) -> None:
        """The policy that training starts from becomes the centre of the trust region.

        With LoRA its adapters are merged and reinitialised: the reference is the model without adapters, and where it
        stays so, it needs no copy.
        """
        self.policy.merge_adapters()
        self.reference = None if self._without_adapters else self._current_weights()
        self._has_reference = True

    def move_reference(self, kind: str, decay: float) -> None:
        """``interfaces.Policy``. With LoRA the ema is one of the adapters' two factors, each by itself."""
        if kind == "previous":
            self.reference = self._current_weights()
        elif kind == "ema":
            pairs = zip(self.reference, self._current_weights(), strict=True)
            # fp32: in bf16, moves below its spacing would never add up.
            self.reference = [old.to(new.device).float().lerp(new.float(), 1 - decay) for old, new in pairs]

    def as_reference(self) -> AbstractContextManager:
        """Inside the block the model computes as the frozen reference."""
        if not self._has_reference:
            raise RuntimeError("no reference policy: call freeze_reference() before training")
        return self.policy.without_adapters() if self._without_adapters else self.policy.weights(self.reference)

    @property
    def _without_adapters(self) -> bool:
        """Whether the reference is the policy with its adapters off."""
        return self.built.lora is not None and self.settings.reference == "initial"

    def _current_weights(self) -> Weights:
        return self.policy.snapshot(resident=self.settings.reference_placement == "resident")
