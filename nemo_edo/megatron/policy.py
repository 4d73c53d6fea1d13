"""A Megatron model that is trained: its optimizer, its schedule, and frozen copies of its weights."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_edo.config import ModelConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.megatron.bridge import BuiltModel, shares_mxfp8_buffer
from nemo_edo.megatron.lora import merge_adapters
from nemo_edo.megatron.optimizer_state import adapt_checkpointing, parts
from nemo_edo.megatron.output_layer import LossHead
from nemo_edo.megatron.precision import DTYPES
from nemo_edo.parallel.main_rank import any_rank

Weights = list[Tensor]  # a frozen copy of this rank's trained parameters, in their order; with LoRA, of the adapters


@dataclass(eq=False, repr=False)
class MegatronPolicy:
    """A model with what trains it. ``forward_backward`` runs it. It contains no maths."""

    built: BuiltModel
    parallelism: ParallelismConfig
    precision: PrecisionConfig
    device: torch.device
    loss_head: str = ModelConfig.loss_head
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None

    def __post_init__(self) -> None:
        self.head = LossHead(self.built.chunks, self.loss_head, self.built.vocab_size)
        self.has_equal_copies = False  # whether tensor-parallel ranks have compared their gradients
        self.metric_names: list[str] = []  # of the last step, which ranks exchange only where they change

    @property
    def chunks(self) -> list[MegatronModule]:
        return self.built.chunks

    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer, and a learning-rate schedule over ``total_steps``."""
        parallelism, precision = self.parallelism, self.precision
        offload = parallelism.optimizer_offload_fraction
        as_given = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                **{name: getattr(config, name) for name in as_given},
                bf16=precision.dtype == "bf16",
                params_dtype=DTYPES[precision.dtype],
                use_distributed_optimizer=parallelism.use_distributed_optimizer,
                overlap_param_gather=parallelism.overlap_param_gather,
                fp8_recipe=precision.fp8_recipe if precision.fp8 else None,
                reuse_grad_buf_for_mxfp8_param_ag=shares_mxfp8_buffer(precision),
                optimizer_cpu_offload=offload > 0,
                optimizer_offload_fraction=offload,
                use_precision_aware_optimizer=offload > 0,  # Megatron offloads along its path only
            ),
            self.chunks,
        )
        adapt_checkpointing(self.optimizer)
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

    def zero_grad(self) -> None:
        for chunk in self.built.training_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def apply_gradients(self, loss: float = 0.0, *, grad_norm_limit: float = math.inf) -> dict[str, float]:
        """Clips, steps and advances the schedule; returns "grad_norm" (before clipping), "lr" and "skipped", 0 or 1.

        The step is skipped, on every rank, where on any of them the ``loss`` or the gradient norm is not finite or the
        norm is above ``grad_norm_limit``: weights, optimizer and schedule stay as they are, and gradients are zeroed.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        overflow = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        usable = not overflow and math.isfinite(loss) and math.isfinite(grad_norm) and grad_norm <= grad_norm_limit
        skipped = any_rank(not usable)
        if skipped:
            self.zero_grad()
        else:
            # Megatron's own clipping, with the norm that is already known: its own ``step`` would check it too late.
            for part in parts(self.optimizer):
                parameters, config = part.get_parameters(), part.config
                if parameters and config.clip_grad > 0:
                    decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(parameters, config.clip_grad, grad_norm, decoupled)
            self.optimizer.step_with_ready_grads()
            self.built.stale = self.parallelism.overlap_param_gather
            self.scheduler.step(increment=1)
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(skipped)}

    def gradient_norm(self) -> float:
        """Norm of the accumulated gradient over all ranks, before clipping; no step is taken."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def is_finite(self) -> bool:
        """Whether every trained weight is a finite number, on every rank; every rank calls it."""
        return not any_rank(not all(parameter.isfinite().all() for parameter in self._parameters()))

    def snapshot(self, *, resident: bool = False) -> Weights:
        """A copy of the current trained weights: on their own device, or in host memory (pinned with a GPU)."""
        weights = [parameter.detach() for parameter in self._parameters()]
        if resident:
            return [copied(weight) for weight in weights]
        # Pinned memory: a GPU reads and writes it at the full speed of its bus.
        return [torch.empty_like(w, device="cpu", pin_memory=w.is_cuda).copy_(w) for w in weights]

    def load(self, weights: Weights) -> None:
        """Puts a snapshot's weights in place. The optimizer's fp32 copies, where it has them, follow."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), weights, strict=True):
                parameter.copy_(value)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def merge_adapters(self) -> None:
        """Merges the adapters into the weights and reinitialises them; does nothing without LoRA."""
        if self.built.lora is not None:
            merge_adapters(self.chunks, self.built.seed)
            if self.optimizer is not None:
                self.optimizer.reload_model_params()

    @contextlib.contextmanager
    def weights(self, frozen: Weights) -> Iterator[None]:
        """Inside the block the model computes with ``frozen``; its own weights return after it.

        The two are exchanged, so that no third copy is needed: by address where they are on one device, otherwise by
        contents, one parameter at a time. Meanwhile ``frozen`` holds the model's own. An optimizer's fp32 weights stay.
        """
        pairs = [(p, _in_numbers_of(p, f)) for p, f in zip(self._parameters(), frozen, strict=True)]
        _exchange(pairs)
        try:
            yield
        finally:
            _exchange(pairs)

    def _parameters(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)


def copied(weight: Tensor) -> Tensor:
    """Not ``clone``: of an FP8 weight it shares the scales (Transformer Engine 2.16 to 2.20) with the original."""
    return torch.empty_like(weight).copy_(weight)


@torch.no_grad()
def _in_numbers_of(parameter: Tensor, frozen: Tensor) -> Tensor:
    """A frozen weight, of which an ema is in fp32, in the parameter's own numbers; in FP8 they are a GPU's to make."""
    if frozen.dtype == parameter.dtype or type(parameter.detach()) is Tensor:
        return frozen.to(parameter.dtype)
    quantized = torch.empty_like(parameter.detach()).copy_(frozen)
    return torch.empty_like(quantized, device=frozen.device).copy_(quantized)


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Swaps parameters with frozen copies of their dtype; a second call undoes the first, to the last bit."""
    for parameter, other in pairs:
        if parameter.device == other.device:
            parameter.data, other.data = other.data, parameter.data
        else:
            exchange_contents(parameter, other)
    torch.cuda.synchronize()  # pinned memory is written asynchronously


def exchange_contents(one: Tensor, other: Tensor) -> None:
    """Two tensors of one shape and dtype, on different devices; needs memory for a second copy of ``one``."""
    kept = copied(one)
    one.copy_(other, non_blocking=True)
    other.copy_(kept, non_blocking=True)
