"""What the model classes share: ModelPT around a Megatron policy, with NeMo-Aligner's life cycle."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from nemo.core.classes import ModelPT
from nemo.utils.app_state import AppState
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_edo.config import LoRAConfig, ModelConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.data.shares import MicroBatching, Share
from nemo_edo.interfaces import GenerationEngine, WeightSync
from nemo_edo.losses import LossTerm
from nemo_edo.megatron.bridge import build_model
from nemo_edo.megatron.forward_backward import LossFunction
from nemo_edo.megatron.layer_spec import check_packing
from nemo_edo.megatron.policy import MegatronPolicy
from nemo_edo.megatron.process_groups import device_and_groups
from nemo_edo.models.save_restore import MegatronSaveRestoreConnector
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams, TrainingBatch


def model_config(
    folder: Path | str,
    *,
    parallelism: ParallelismConfig,
    precision: PrecisionConfig,
    seed: int,
    training: object,
    lora: LoRAConfig | None = None,
    temperature: float = 1.0,
    threads: int | None = None,
    attention: str = ModelConfig.attention,
    loss_head: str = ModelConfig.loss_head,
) -> DictConfig:
    """The ``cfg`` of a model class. ``training``: an SFTConfig, GRPOConfig or IDPOConfig, as the class needs."""
    sections = {"parallelism": parallelism, "precision": precision, "training": training, "lora": lora or LoRAConfig()}
    return OmegaConf.create(
        {
            "folder": str(folder),
            "seed": seed,
            "threads": threads,
            "temperature": temperature,
            "attention": attention,
            "loss_head": loss_head,
            **{name: OmegaConf.structured(value) for name, value in sections.items()},
        }
    )


class MegatronGPTModel(ModelPT):
    """A GPT model of Megatron-core, trained by Megatron's optimizer and schedule.

    A subclass names the dataclass of its ``cfg.training`` and gives the loss of a micro-batch. Called on every rank
    itself, it takes global batches, the same on all of them; in a run, each rank gets its share (``worker/``).
    """

    training_config: type

    def __init__(self, cfg: DictConfig, trainer=None) -> None:
        super().__init__(cfg, trainer)
        parallelism, precision = ParallelismConfig(**cfg.parallelism), PrecisionConfig(**cfg.precision)
        self.settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(self.training_config), cfg.training))
        self.platform_device = device_and_groups(parallelism, cfg.seed, cfg.threads)
        # ModelPT lets every rank take part in save_to only where NeMo knows of model parallelism.
        AppState().model_parallel_size = (
            parallelism.tensor_model_parallel_size * parallelism.pipeline_model_parallel_size
        )
        lora = LoRAConfig(**cfg.lora)
        self.built = build_model(
            Path(cfg.folder),
            parallelism,
            precision,
            self.platform_device,
            lora=lora,
            seed=cfg.seed,
            attention=cfg.attention,
        )
        if self.settings.packing:
            check_packing(self.built.chunks, share_prompts=self.settings.share_prompts)
        self.model = torch.nn.ModuleList(self.built.chunks)
        self.policy = MegatronPolicy(self.built, parallelism, precision, self.platform_device, cfg.loss_head)
        self.temperature = cfg.temperature
        self.engine: GenerationEngine | None = None
        self.weight_sync: WeightSync | None = None

    # --- the loss, given by the subclass ---------------------------------------------------------------------------

    @abstractmethod
    def loss(
        self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        """The loss's terms by name, and metrics, of a micro-batch from its log-probabilities and entropies [b, T]."""

    @abstractmethod
    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        """Each term's denominator: its count over a whole global batch, known before the backward pass."""

    def of_tokens(self, batch: TrainingBatch) -> Callable[[Tensor, Tensor], dict[str, float]] | None:
        """Metrics of a whole global batch from its log-probabilities and entropies (``forward_backward``); None: there
        are none, and the ranks gather nothing."""
        return None

    def shares(self, batch: TrainingBatch) -> list[Share]:
        """Each data-parallel rank's share of a global batch."""
        return self.policy.shares(batch, self.micro_batching)

    # --- training --------------------------------------------------------------------------------------------------

    def start_training(self, total_steps: int, optimizer: OptimizerConfig | None = None) -> None:
        """A fresh Megatron optimizer and a schedule over ``total_steps`` (default: ``cfg.training.optimizer``)."""
        self.policy.reset_optimizer(optimizer or self.settings.optimizer, total_steps)

    def prepare_for_training_step(self) -> None:
        self.model.train()
        self.policy.zero_grad()

    def get_loss_and_metrics(self, batch: TrainingBatch, forward_only: bool) -> tuple[float, dict[str, float]]:
        """Global means of the loss and its metrics; accumulates gradients unless ``forward_only``."""
        metrics = self._forward_backward(batch, self.loss, forward_only=forward_only)
        return metrics["loss"], metrics

    def _forward_backward(self, batch: TrainingBatch, loss: LossFunction, *, forward_only: bool) -> dict[str, float]:
        return self.policy.forward_backward(
            batch,
            loss,
            loss_counts=self.loss_counts(batch),
            micro_batching=self.micro_batching,
            temperature=self.temperature,
            forward_only=forward_only,
            of_tokens=self.of_tokens(batch),
        )

    def finish_training_step(self, loss: float = 0.0, *, grad_norm_limit: float = math.inf) -> dict[str, float]:
        """Takes the optimizer step, unless the loss or the gradient norm forbids it; returns "grad_norm" (before
        clipping), "lr" and "skipped": ``MegatronPolicy.apply_gradients``."""
        return self.policy.apply_gradients(loss, grad_norm_limit=grad_norm_limit)

    def train_step(self, batch: TrainingBatch, *, grad_norm_limit: float = math.inf) -> dict[str, float]:
        """The three above in a row: ``interfaces.Policy``."""
        return self._train_step(batch, self.loss, grad_norm_limit)

    def _train_step(self, batch: TrainingBatch, loss: LossFunction, grad_norm_limit: float) -> dict[str, float]:
        self.prepare_for_training_step()
        metrics = self._forward_backward(batch, loss, forward_only=False)
        return {**metrics, **self.finish_training_step(metrics["loss"], grad_norm_limit=grad_norm_limit)}

    def prepare_for_validation_step(self) -> None:
        self.model.eval()

    @torch.no_grad()
    def validation_step(self, batch: TrainingBatch) -> dict[str, float]:
        return self.get_loss_and_metrics(batch, forward_only=True)[1]

    def finish_validation_step(self) -> None:
        self.model.train()

    # --- inference -------------------------------------------------------------------------------------------------

    def prepare_for_inference(self) -> None:
        if self.engine is None:
            raise RuntimeError("no generation engine: set model.engine (run/build.py builds one) before inference")
        self.model.eval()

    def infer(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """One rollout for each request, from the current weights."""
        return self.engine.generate(requests, sampling)

    def finish_inference(self) -> None:
        self.model.train()

    def get_inference_log_probs(self, batch: TrainingBatch) -> Tensor:
        """[B, T] log-probabilities of the response tokens under the current weights; zero where the mask is."""
        return self.logprobs(batch)[0]

    def logprobs(self, batch: TrainingBatch, *, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and exact entropies of the response tokens, each [B, T]: ``interfaces.Policy``."""
        at = self.temperature if temperature is None else temperature
        return self.policy.logprobs(batch, micro_batching=self.micro_batching, temperature=at)

    @property
    def micro_batching(self) -> MicroBatching:
        settings = self.settings
        return MicroBatching(
            settings.micro_batch_size, settings.micro_batch_tokens, settings.packing, settings.share_prompts
        )

    # --- NeMo ------------------------------------------------------------------------------------------------------

    @classmethod
    def restore_from(cls, restore_path: str, *args, save_restore_connector=None, **kwargs):
        connector = save_restore_connector or MegatronSaveRestoreConnector()
        return super().restore_from(restore_path, *args, save_restore_connector=connector, **kwargs)

    def save_to(self, save_path: str) -> None:
        self._save_restore_connector = MegatronSaveRestoreConnector()
        super().save_to(save_path)

    @classmethod
    def list_available_models(cls) -> list:
        return []  # pretrained weights come as Hugging Face folders

    def setup_training_data(self, train_data_config) -> None:
        """Batches are handed to ``train_step``; the model owns no loader."""

    def setup_validation_data(self, val_data_config) -> None:
        """Batches are handed to ``validation_step``; the model owns no loader."""
