"""The model classes with an exploration term: ED-GRPO and ED-iDPO."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor

from nemo_edo import losses
from nemo_edo.config import GRPOConfig, IDPOConfig
from nemo_edo.data.shares import Share
from nemo_edo.megatron.forward_backward import LossFunction, Terms, forward_backward
from nemo_edo.megatron.lora import adapters_off
from nemo_edo.megatron.policy import Weights
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.types import TrainingBatch


class MegatronGPTExploringModel(MegatronGPTModel):
    """What ED-GRPO and ED-iDPO share: a frozen reference, and a loss with an exploration term."""

    measures_tokens = True
    reference: Weights | None = None  # a copy of its weights, where one is needed
    _has_reference = False

    def token_metrics(self, batch: TrainingBatch, logprobs: Tensor, entropies: Tensor) -> dict[str, float]:
        """How far the policy is from the one that sampled the batch's tokens, and how its entropies spread."""
        return losses.token_spread(logprobs, entropies, old_logprobs=batch.old_logprobs, mask=batch.own.mask)

    @abstractmethod
    def exploration_alone(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float
    ) -> Terms:
        """A loss whose term "exploration" is the exploration term alone."""

    @abstractmethod
    def exploration_count(self, batch: TrainingBatch) -> float:
        """The exploration term's count over a whole global batch."""

    def exploration_gradient_ratio(self, share: Share, exploration_count: float) -> float:
        """Norm of the exploration term's gradient at weight 1 over that of the rest of the loss, of a global batch of
        which each rank has its share. inf where the rest has no gradient, 0 where neither has one."""
        task = self._gradient_norm(share, self.loss, exploration_weight=0.0)
        alone = replace(share, loss_counts={"exploration": exploration_count})
        exploration = self._gradient_norm(alone, self.exploration_alone, exploration_weight=1.0)
        if task == 0:
            return float("inf") if exploration > 0 else 0.0
        return exploration / task

    def _gradient_norm(self, share: Share, loss: LossFunction, exploration_weight: float) -> float:
        self.prepare_for_training_step()
        forward_backward(self.policy, share, loss, exploration_weight=exploration_weight, temperature=self.temperature)
        norm = self.policy.gradient_norm()
        self.policy.zero_grad()
        return norm

    # --- the reference ---------------------------------------------------------------------------------------------

    def freeze_reference(self) -> None:
        """The policy that training starts from becomes the centre of the trust region. With LoRA its adapters are
        merged and reinitialised: the reference is the model without adapters, which needs no copy where it stays so."""
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
        return adapters_off(self.policy.chunks) if self._without_adapters else self.policy.weights(self.reference)

    @property
    def _without_adapters(self) -> bool:
        """Whether the reference is the policy with its adapters off."""
        return self.built.lora is not None and self.settings.reference == "initial"

    def _current_weights(self) -> Weights:
        return self.policy.snapshot(resident=self.settings.reference_placement == "resident")


class MegatronGPTGRPOModel(MegatronGPTExploringModel):
    """GRPO, and ED-GRPO where ``cfg.training`` gives the exploration term a weight."""

    training_config = GRPOConfig

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        """See the base class. Over an older policy's responses the exploration term is separate, with its own count."""
        settings, mask, explores_own = self.settings, batch.own.mask, batch.older is None
        term, metrics = losses.grpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.advantages,
            mask,
            settings,
            sampler_logprobs=batch.sampler_logprobs,
            exploration_factors=batch.exploration_factors,
            selected=batch.selected,
            exploration_weight=exploration_weight if explores_own else 0.0,
            on_empty="zero",
        )
        if settings.entropy_coefficient:
            bonus = losses.entropy_bonus(
                entropies, mask, reduction=settings.aggregation, norm_length=settings.norm_length, on_empty="zero"
            )
            term = term.plus(bonus, settings.entropy_coefficient)
        metrics["entropy"] = losses.reduce_tokens(entropies.detach(), mask, "token-mean", on_empty="zero")
        terms = {"grpo": term}
        if not explores_own:
            exploration, floored = self._exploration(logprobs, batch), settings.log_ratio_floor
            terms["exploration"] = exploration.scaled(exploration_weight)
            metrics["exploration"] = exploration.detached()
            metrics["floor_fraction"] = losses.floor_share(logprobs, batch.old_logprobs, batch.explored.mask, floored)
        return terms, metrics

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        own = {"grpo": self._count(batch.own)}
        return own if batch.older is None else {**own, "exploration": self.exploration_count(batch)}

    def exploration_alone(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float
    ) -> Terms:
        return {"exploration": self._exploration(logprobs, batch).scaled(exploration_weight)}, {}

    def _exploration(self, logprobs: Tensor, batch: TrainingBatch) -> losses.LossTerm:
        """The exploration term at weight 1."""
        return losses.grpo_exploration(
            logprobs,
            batch.old_logprobs,
            batch.explored.mask,
            self.settings,
            sampler_logprobs=batch.sampler_logprobs,
            exploration_factors=batch.exploration_factors,
            on_empty="zero",
        )

    def exploration_count(self, batch: TrainingBatch) -> float:
        return self._count(batch.explored)

    def _count(self, batch: TrainingBatch) -> float:
        return float(losses.reduction_count(batch.mask, self.settings.aggregation))


class MegatronGPTDPOModel(MegatronGPTExploringModel):
    """Iterative DPO (ETO), and ED-iDPO where ``cfg.training`` gives the exploration term a weight. A batch's rows 2k
    and 2k + 1 are a pair where ``pair_role`` says so; the exploration term runs over rows with exploration factors."""

    training_config = IDPOConfig

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        settings = self.settings
        policy_B = losses.sequence_logprobs(logprobs, batch.mask, length_normalized=settings.length_normalized)
        ref_B = losses.sequence_logprobs(batch.ref_logprobs, batch.mask, length_normalized=settings.length_normalized)
        # All rows in pairs, and a mask: to index by a boolean tensor would wait for the device.
        preference, exploration, metrics = losses.ed_idpo_loss(
            policy_B[0::2],
            policy_B[1::2],
            ref_B[0::2],
            ref_B[1::2],
            logprobs,
            batch.old_logprobs,
            batch.mask * (batch.exploration_factors != 0)[:, None],
            settings,
            pair_mask=batch.pair_role[0::2] == 1,
            exploration_weight=exploration_weight,
            on_empty="zero",
        )
        # In double, as a metric that overflows must not cost the step.
        kl = losses.kl_per_token(logprobs.detach().double(), batch.ref_logprobs.double(), "k3")
        metrics |= {
            "entropy": losses.reduce_tokens(entropies.detach(), batch.mask, "token-mean"),
            "kl": losses.reduce_tokens(kl, batch.mask, "token-mean"),
        }
        if batch.sampler_logprobs is not None:
            metrics |= losses.sampler_gap(batch.old_logprobs, batch.sampler_logprobs, batch.mask)
        return {"preference": preference, "exploration": exploration}, metrics

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        pairs = float((batch.pair_role == 1).sum())
        return {"preference": pairs, "exploration": self.exploration_count(batch)}

    exploration_alone = loss  # its term "exploration" is a separate one

    def exploration_count(self, batch: TrainingBatch) -> float:
        return float((batch.exploration_factors != 0).sum())
