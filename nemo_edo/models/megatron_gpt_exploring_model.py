from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from megatron.core import parallel_state
from torch import Tensor

from nemo_edo.data.shares import Share
from nemo_edo.losses import LossTerm, token_spread
from nemo_edo.megatron.forward_backward import LossFunction
from nemo_edo.megatron.policy import Weights
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.types import TrainingBatch


class MegatronGPTExploringModel(MegatronGPTModel):
    """What ED-GRPO and ED-iDPO share: a frozen reference, and a loss that takes the step's exploration weight."""

    reference: Weights | None = None
    """A copy of its weights, where one is needed."""
    _has_reference = False

    def of_tokens(self, batch: TrainingBatch) -> Callable[[Tensor, Tensor], dict[str, float]]:
        """How far the policy is from the one that sampled the batch's tokens, and how its entropies spread."""
        return partial(token_spread, old_logprobs=batch.old_logprobs, mask=batch.own.mask)

    # --- the exploration term --------------------------------------------------------------------------------------

    @abstractmethod
    def loss(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, *, exploration_weight: float | None = None
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        """See the base class. exploration_weight: what multiplies the exploration term; None: the configured one."""

    @abstractmethod
    def exploration(self, logprobs: Tensor, batch: TrainingBatch) -> LossTerm:
        """The exploration term of a micro-batch, at weight 1."""

    @abstractmethod
    def exploration_count(self, batch: TrainingBatch) -> float:
        """Its count over a whole global batch."""

    def train_step(
        self, batch: TrainingBatch, *, exploration_weight: float | None = None, grad_norm_limit: float = math.inf
    ) -> dict[str, float]:
        """``interfaces.Policy``."""
        return self._train_step(batch, partial(self.loss, exploration_weight=exploration_weight), grad_norm_limit)

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        """``interfaces.Policy``. inf where the rest of the loss has no gradient, 0 where neither has one."""
        share = self.shares(batch)[parallel_state.get_data_parallel_rank()]
        return self.share_gradient_ratio(share, self.loss_counts(batch), self.exploration_count(batch))

    def share_gradient_ratio(self, share: Share, loss_counts: Mapping[str, float], exploration_count: float) -> float:
        """``exploration_gradient_ratio`` of a global batch of which each rank has its share."""
        task = self._gradient_norm(share, partial(self.loss, exploration_weight=0.0), loss_counts)
        exploration = self._gradient_norm(share, self._exploration_alone, {"exploration": exploration_count})
        if task == 0:
            return float("inf") if exploration > 0 else 0.0
        return exploration / task

    def _exploration_alone(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        return {"exploration": self.exploration(logprobs, batch)}, {}

    def _gradient_norm(self, share: Share, loss: LossFunction, counts: Mapping[str, float]) -> float:
        self.prepare_for_training_step()
        self.policy.forward_backward_share(share, loss, loss_counts=counts, temperature=self.temperature)
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

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        """[B, T] log-probabilities under the frozen reference: ``interfaces.Policy``."""
        with self.as_reference():
            return self.logprobs(batch)[0]

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
