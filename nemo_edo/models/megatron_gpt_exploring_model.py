from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from nemo_edo.config import LoopConfig, ScheduleConfig
from nemo_edo.losses import LossTerm, token_spread
from nemo_edo.megatron.forward_backward import LossFunction
from nemo_edo.megatron.policy import Weights
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.types import TrainingBatch


class MegatronGPTExploringModel(MegatronGPTModel):
    """What ED-GRPO and ED-iDPO share: a frozen reference, and an exploration weight that may change in each step."""

    reference: Weights | None = None
    """A copy of its weights, where one is needed."""
    _has_reference = False
    exploration_weight: float

    def __init__(self, cfg, trainer=None) -> None:
        super().__init__(cfg, trainer)
        self.exploration_weight = self.settings.exploration_weight

    @property
    def step_settings(self) -> LoopConfig:
        """The settings with the exploration weight of the current step; what a schedule starts from is not its."""
        weight, no_schedule = self.exploration_weight, ScheduleConfig()
        return replace(self.settings, alpha=None, exploration_coefficient=weight, schedule=no_schedule)

    def of_tokens(self, batch: TrainingBatch) -> Callable[[Tensor, Tensor], dict[str, float]]:
        """How far the policy is from the one that drew the batch's tokens, and how its entropies spread."""
        return partial(token_spread, old_logprobs=batch.old_logprobs, mask=batch.mask)

    # --- the exploration term --------------------------------------------------------------------------------------

    @abstractmethod
    def exploration(self, log_probs: Tensor, batch: TrainingBatch) -> LossTerm:
        """The exploration term of a micro-batch, at weight 1."""

    @abstractmethod
    def exploration_count(self, batch: TrainingBatch) -> float:
        """Its count over a whole global batch."""

    def train_step(
        self, batch: TrainingBatch, *, exploration_weight: float | None = None, grad_norm_limit: float = math.inf
    ) -> dict[str, float]:
        """``interfaces.Policy``."""
        self.exploration_weight = self.settings.exploration_weight if exploration_weight is None else exploration_weight
        return super().train_step(batch, grad_norm_limit=grad_norm_limit)

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        """``interfaces.Policy``. inf where the rest of the loss has no gradient, 0 where neither has one."""
        weight, self.exploration_weight = self.exploration_weight, 0.0
        task = self._gradient_norm(batch, self.loss, self.loss_counts(batch))
        self.exploration_weight = weight
        exploration = self._gradient_norm(
            batch,
            lambda log_probs, entropies, micro: ({"exploration": self.exploration(log_probs, micro)}, {}),
            {"exploration": self.exploration_count(batch)},
        )
        if task == 0:
            return float("inf") if exploration > 0 else 0.0
        return exploration / task

    def _gradient_norm(self, batch: TrainingBatch, loss: LossFunction, counts: dict[str, float]) -> float:
        self.prepare_for_training_step()
        self.policy.forward_backward(
            batch, loss, loss_counts=counts, micro_batching=self.micro_batching, temperature=self.temperature
        )
        norm = self.policy.gradient_norm()
        self.policy.zero_grad()
        return norm

    # --- the reference ---------------------------------------------------------------------------------------------

    def freeze_reference(self) -> None:
        """The policy that training starts from becomes the centre of the trust region.

        With LoRA its adapters are merged and start anew: the reference is the model without adapters, and if it is to
        stay that, needs no copy.
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

    def reference_log_probs(self, batch: TrainingBatch) -> Tensor:
        """[B, T] log-probabilities under the frozen reference: ``interfaces.Policy``."""
        if not self._has_reference:
            raise RuntimeError("no reference policy: call freeze_reference() before training")
        policy = self.policy
        with policy.without_adapters() if self._without_adapters else policy.weights(self.reference):
            return self.log_probs(batch)[0]

    @property
    def _without_adapters(self) -> bool:
        """Whether the reference is the policy with its adapters off."""
        return self.built.lora is not None and self.settings.reference == "initial"

    def _current_weights(self) -> Weights:
        return self.policy.snapshot(resident=self.settings.reference_placement == "resident")
