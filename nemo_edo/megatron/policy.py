"""A Megatron model that is trained: its optimizer, its schedule, and frozen copies of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from nemo_edo.config import OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.megatron.build import BuiltModel
from nemo_edo.megatron.forward_backward import LossFunction, forward_backward, log_probs_and_entropy
from nemo_edo.megatron.lora import merge_adapters
from nemo_edo.types import TrainingBatch

Weights = list[Tensor]
"""A frozen copy of this rank's trained parameters, in their order: with LoRA, of the adapters alone."""


class MegatronPolicy:
    """Runs loss functions through the model and Megatron's optimizer. It holds no maths of its own."""

    def __init__(
        self, built: BuiltModel, parallelism: ParallelismConfig, precision: PrecisionConfig, device: torch.device
    ) -> None:
        self.built = built
        self.chunks = built.chunks
        self.device = device
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self._distributed_optimizer = parallelism.use_distributed_optimizer
        self._bf16 = precision.dtype == "bf16"

    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer, and a learning-rate schedule over ``total_steps``."""
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad,
                bf16=self._bf16,
                params_dtype=torch.bfloat16 if self._bf16 else torch.float32,
                use_distributed_optimizer=self._distributed_optimizer,
            ),
            self.chunks,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(total_steps, config.warmup_steps + 1),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )

    def train_step(self, batch: TrainingBatch, loss: LossFunction, **settings) -> dict[str, float]:
        """One optimizer step. Returns the metrics of ``forward_backward``, "grad_norm" (before clipping) and "lr"."""
        self.zero_grad()
        metrics = self.forward_backward(batch, loss, **settings)
        return {**metrics, **self.apply_gradients()}

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(self, batch: TrainingBatch, loss: LossFunction, **settings) -> dict[str, float]:
        """Accumulates gradients only; ``settings`` as in ``forward_backward.forward_backward``."""
        return forward_backward(self.chunks, batch.to(self.device), loss, vocab_size=self.built.vocab_size, **settings)

    def apply_gradients(self) -> dict[str, float]:
        """Clips, steps and moves the schedule on. Raises FloatingPointError for a gradient that is not finite."""
        lr = self.optimizer.param_groups[0]["lr"]
        succeeded, grad_norm, _ = self.optimizer.step()
        grad_norm = float(grad_norm) if grad_norm is not None else 0.0
        if not succeeded or not torch.isfinite(torch.tensor(grad_norm)):
            raise FloatingPointError(f"the gradient norm is {grad_norm}: training cannot go on from here")
        self.scheduler.step(increment=1)
        return {"grad_norm": grad_norm, "lr": float(lr)}

    def gradient_norm(self) -> float:
        """Norm of the accumulated gradient over all ranks, before clipping; no step is taken."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def log_probs(self, batch: TrainingBatch, **settings) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, T] of the current weights, on the CPU. ``settings`` as in
        ``forward_backward.log_probs_and_entropy``."""
        results = log_probs_and_entropy(
            self.chunks, batch.to(self.device), vocab_size=self.built.vocab_size, **settings
        )
        return results[0].cpu(), results[1].cpu()

    def snapshot(self) -> Weights:
        """A copy of the current trained weights in host memory."""
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    def load(self, weights: Weights) -> None:
        """Puts a snapshot's weights in place. The optimizer's fp32 copies, where it has them, follow."""
        self._put(weights)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def merge_adapters(self) -> None:
        """The current weights become those without adapters, and the adapters start anew. Nothing without LoRA."""
        if self.built.lora is not None:
            merge_adapters(self.chunks, self.built.seed)
            if self.optimizer is not None:
                self.optimizer.reload_model_params()

    @contextlib.contextmanager
    def weights(self, frozen: Weights) -> Iterator[None]:
        """Inside the block the model computes with ``frozen``; its own weights return behind it."""
        own = self.snapshot()
        self._put(frozen)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: Weights) -> None:
        for parameter, value in zip(self._parameters(), weights, strict=True):
            parameter.copy_(value)

    def _parameters(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)
