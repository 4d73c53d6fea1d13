"""What a rank does for the run: it has the model, its optimizer and reference, and the engine over its weights. The
controller calls these methods on all ranks. Megatron is imported in them: ``begin`` adapts it to the machine first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.config import GRPOConfig, IDPOConfig, ParallelismConfig, SFTConfig
from nemo_edo.utils.memory import free_unused_memory

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_edo.data.shares import Share
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.megatron.background import Writing
    from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
    from nemo_edo.types import GenerationRequest, Rollout, SamplingParams


@dataclass(frozen=True)
class Place:
    """A rank's part of the model and of the data."""

    share: int  # the data-parallel rank: which share of a batch it gets
    answers: bool  # whether it returns its share's results; the other ranks of the share have the same, or none
    layers: int  # of the whole model
    kernels: dict[str, str]


ALIVE_EVERY_S = 10.0  # how often a rank whose responses go on tells so


class Worker:
    """A rank's model and what is done with it."""

    def __init__(self) -> None:
        self.model: MegatronGPTModel | None = None
        self._engine: MegatronEngine | None = None
        self._writing: Writing | None = None
        self._answers = True
        self.tell: Callable[[Any], None] = lambda news: None  # tells the controller something during a call

    def begin(self, parallelism: ParallelismConfig, seed: int, threads: int | None) -> None:
        """Joins the other ranks. Raises UserError where the model cannot be split over so many."""
        from nemo_edo.megatron.platform import device_and_groups

        device_and_groups(parallelism, seed, threads)

    def enter(self, threads: int | None) -> None:
        """``begin``, before the model's split is known."""
        from nemo_edo.megatron import platform

        platform.init_process_group(platform.enter(threads))

    def build(self, training: SFTConfig | GRPOConfig | IDPOConfig, weights: Path | None, settings: dict) -> Place:
        """weights: a checkpoint's; None: those of the model's folder. settings: of ``model_config``."""
        self.begin(settings["parallelism"], settings["seed"], settings["threads"])
        from nemo_edo.megatron import checkpoint
        from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
        from nemo_edo.models.megatron_gpt_model import model_config

        self.drop()
        classes = {SFTConfig: MegatronGPTSFTModel, GRPOConfig: MegatronGPTGRPOModel, IDPOConfig: MegatronGPTDPOModel}
        model = classes[type(training)](model_config(training=training, **settings))
        if weights is not None:
            checkpoint.load(model.policy, weights)
        return self.adopt(model)

    def adopt(self, model: MegatronGPTModel) -> Place:
        """Works with a model from now on."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        from nemo_edo.megatron.layer_spec import kernels

        self.model = model
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        inner = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_context_parallel_rank()
        self._answers = pipeline.rank() == pipeline.size() - 1 and not inner
        layers = get_model_config(model.built.training_chunks[0]).num_layers
        return Place(parallel_state.get_data_parallel_rank(), self._answers, layers, kernels(model.built.chunks))

    def drop(self) -> None:
        self.model = self._engine = self._writing = None
        free_unused_memory()

    # --- training -------------------------------------------------------------------------------------------------

    def start_training(self, total_steps: int) -> None:
        self.model.start_training(total_steps)

    def train_step(
        self, share: Share, exploration_weight: float, grad_norm_limit: float
    ) -> tuple[dict[str, float], Tensor | None]:
        """The means of the loss and its metrics with what ``finish_training_step`` says, and where the model measures
        tokens the share's log-probabilities and entropies, [2, b, t]."""
        self.model.prepare_for_training_step()
        metrics, tokens = self.model.loss_pass(share, exploration_weight)
        step = self.model.finish_training_step(metrics["loss"], grad_norm_limit=grad_norm_limit)
        return {**metrics, **step}, self._if_asked(tokens)

    def exploration_gradient_ratio(self, share: Share, exploration_count: float) -> float:
        return self.model.exploration_gradient_ratio(share, exploration_count)

    def logprobs(self, share: Share, temperature: float | None = None) -> Tensor | None:
        """[2, b, t]: log-probabilities and entropies of the share. temperature: None: the one that is trained at."""
        from nemo_edo.megatron.forward_backward import logprobs_and_entropy

        model = self.model
        temperature = model.temperature if temperature is None else temperature
        return self._if_asked(logprobs_and_entropy(model.policy, share, temperature))

    def reference_logprobs(self, share: Share) -> Tensor | None:
        with self.model.as_reference():
            return self.logprobs(share)

    def _if_asked(self, values: Tensor | None) -> Tensor | None:
        """The values on the CPU, or None where this rank does not answer for its share."""
        return None if values is None or not self._answers else values.cpu()

    def freeze_reference(self) -> None:
        self.model.freeze_reference()

    def move_reference(self, kind: str, decay: float) -> None:
        self.model.move_reference(kind, decay)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def is_finite(self) -> bool:
        return self.model.policy.is_finite()

    def save(self, folder: Path, extra: dict[str, Any] | None) -> None:
        from nemo_edo.megatron import checkpoint

        checkpoint.save(self.model.policy, folder, extra=extra)

    def begin_save(self, folder: Path, with_reference: bool, extra: dict[str, Any], reshardable: bool) -> None:
        """Begins to save weights and optimizer in the background; ``is_saved`` completes it."""
        from nemo_edo.megatron import checkpoint

        self._writing = checkpoint.begin_save(
            self.model.policy,
            folder,
            with_optimizer=True,
            reference=self.model.reference if with_reference else None,
            extra=extra,
            reshardable=reshardable,
        )

    def is_saved(self, wait: bool) -> bool:
        return self._writing.is_finished(wait=wait)

    def load(self, folder: Path) -> None:
        from nemo_edo.megatron import checkpoint

        checkpoint.load(self.model.policy, folder)

    def resume(self, folder: Path, with_reference: bool) -> str | None:
        """Weights and optimizer, after ``check_checkpoint``. Returns how the layouts differ, if they do."""
        from nemo_edo.megatron import checkpoint

        checkpoint.load(self.model.policy, folder, with_optimizer=True, is_checked=True)
        if with_reference:
            self.model.reference = checkpoint.load_reference(self.model.policy, folder)
        return checkpoint.changed_layout(folder)

    def check_checkpoint(self, folder: Path) -> None:
        """Raises DamagedCheckpoint where a file is not what was written; the ranks share the reading."""
        from nemo_edo.megatron import checkpoint

        checkpoint.check_checksums(folder)

    # --- generation -----------------------------------------------------------------------------------------------

    def build_engine(
        self,
        stop_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        max_batch_size: int | str,
        keeps_experts: bool = False,
    ) -> None:
        import torch

        from nemo_edo.generation.megatron_engine import MegatronEngine

        self._engine = MegatronEngine(
            self.model.built,
            stop_ids=stop_ids,
            decode=decode,
            max_batch_size=max_batch_size,
            device=self.model.platform_device,
            keeps_experts=keeps_experts,
            progress=torch.distributed.get_rank() == 0,
        )

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams, longest: tuple[int, int]) -> None:
        """Tells responses to the share's requests as they end, perhaps none: their places, and them without their
        prompts, which the controller has. longest: prompt and response of all shares, in tokens."""
        told_at = time.monotonic()

        def ended(places: list[int], rollouts: list[Rollout]) -> None:
            nonlocal told_at
            if self._answers and (places or time.monotonic() > told_at + ALIVE_EVERY_S):
                told_at = time.monotonic()
                self.tell((places, [replace(rollout, prompt_ids=()) for rollout in rollouts]))

        self._engine.generate(requests, sampling, longest, ended)

    # --- weights for others ---------------------------------------------------------------------------------------

    def export(self, folder: Path, max_shard_bytes: int, merge_adapters: bool) -> None:
        from nemo_edo.megatron.hf_export import export_hf_folder

        export_hf_folder(self.model.built, folder, max_shard_bytes, merge_adapters=merge_adapters)

    def export_adapters(self, folder: Path, base: str | None) -> None:
        from nemo_edo.megatron.hf_export import export_adapter_folder

        export_adapter_folder(self.model.built, folder, base)

    def stream_weights(self, take: Callable[[str, Tensor], None] = lambda name, weight: None) -> None:
        """Gives ``take``, on rank 0, the current weights as ``hf_export.streamed``."""
        from nemo_edo.megatron.hf_export import streamed

        for name, weight in streamed(self.model.built):
            take(name, weight)

    def free_gpu_memory(self) -> list[int]:
        from nemo_edo.parallel.free_memory import free_gpu_memory

        return free_gpu_memory()
