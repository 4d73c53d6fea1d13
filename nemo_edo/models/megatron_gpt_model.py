"""ModelPT around a Megatron policy, with NeMo-Aligner's life cycle, and its archives; supervised fine-tuning."""

import contextlib
import math
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from nemo.core.classes import ModelPT
from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from nemo.utils.app_state import AppState
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_edo.config import LoRAConfig, ModelConfig, ParallelismConfig, PrecisionConfig, SFTConfig
from nemo_edo.data.shares import Share, cut
from nemo_edo.interfaces import GenerationEngine
from nemo_edo.losses import reduction_count, sft_loss
from nemo_edo.megatron.bridge import build_model
from nemo_edo.megatron.forward_backward import Terms, forward_backward, logprobs_and_entropy, on_every_rank
from nemo_edo.megatron.hf_export import export_hf_folder
from nemo_edo.megatron.layer_spec import check_packing
from nemo_edo.megatron.packing import input_shapes
from nemo_edo.megatron.platform import device_and_groups, enter, init_process_group
from nemo_edo.megatron.policy import MegatronPolicy
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
    return OmegaConf.create(
        {
            "folder": str(folder),
            "seed": seed,
            "threads": threads,
            "temperature": temperature,
            "attention": attention,
            "loss_head": loss_head,
            "parallelism": parallelism,
            "precision": precision,
            "training": training,
            "lora": lora or LoRAConfig(),
        }
    )


class MegatronSaveRestoreConnector(SaveRestoreConnector):
    """``.nemo`` archives: ``model_config.yaml`` and ``hf/``, a Hugging Face folder for any parallel sizes. All
    ranks call both methods; the archive's folder is staged next to it, on the file system that all ranks share."""

    def save_to(self, model, save_path: str) -> None:
        staging = Path(f"{save_path}.staging")
        export_hf_folder(model.built, staging / "hf")
        if torch.distributed.get_rank() == 0:
            config = OmegaConf.create(OmegaConf.to_container(model.cfg))
            config.folder = None  # the archive's own
            OmegaConf.save(config, staging / self.model_config_yaml)
            self._make_nemo_file_from_folder(filename=f"{save_path}.part", source_dir=str(staging))
            Path(f"{save_path}.part").replace(save_path)
            shutil.rmtree(staging)
        torch.distributed.barrier()

    def restore_from(
        self,
        calling_cls,
        restore_path: str,
        override_config_path: DictConfig | str | None = None,
        map_location=None,
        strict: bool = True,
        return_config: bool = False,
        trainer=None,
        validate_access_integrity: bool = True,
    ):
        """``map_location`` and ``strict`` are ModelPT's: the device is the platform's, every weight must be there."""
        init_process_group(enter())
        with contextlib.ExitStack() as cleanup:
            archive, folder = Path(restore_path), [None]
            if torch.distributed.get_rank() == 0:
                folder = [tempfile.mkdtemp(prefix=f"{archive.name}.", dir=archive.parent)]
                cleanup.callback(shutil.rmtree, folder[0])
                self._unpack_nemo_file(path2file=str(archive), out_folder=folder[0])
            torch.distributed.broadcast_object_list(folder)
            unpacked = Path(folder[0])
            config = OmegaConf.load(unpacked / self.model_config_yaml)
            torch.distributed.barrier()  # every rank has read it
            if override_config_path is not None:
                given = override_config_path
                config = OmegaConf.merge(config, OmegaConf.load(given) if isinstance(given, str) else given)
            if return_config:
                return config
            instance = calling_cls(OmegaConf.merge(config, {"folder": str(unpacked / "hf")}), trainer=trainer)
            torch.distributed.barrier()  # every rank has loaded: the first one's model takes the folder with it
            # An export copies the tokenizer from the folder, so it lasts as long as the model.
            weakref.finalize(instance, cleanup.pop_all().close)
        return instance


class MegatronGPTModel(ModelPT):
    """A GPT model of Megatron-core, trained by Megatron's optimizer and schedule.

    A subclass names the dataclass of its ``cfg.training`` and gives the loss of a micro-batch. A run's workers call it
    with their rank's share of a batch (``worker/``). NeMo's interface takes global batches, the same on every rank.
    """

    training_config: type

    def __init__(self, cfg: DictConfig, trainer=None) -> None:
        super().__init__(cfg, trainer)
        self._save_restore_connector = MegatronSaveRestoreConnector()
        parallelism, precision = ParallelismConfig(**cfg.parallelism), PrecisionConfig(**cfg.precision)
        self.settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(self.training_config), cfg.training))
        self.platform_device = device_and_groups(parallelism, cfg.seed, cfg.threads)
        # ModelPT lets every rank take part in save_to only where NeMo knows of model parallelism.
        tensor, pipeline = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
        AppState().model_parallel_size = tensor * pipeline
        self.built = build_model(
            Path(cfg.folder),
            parallelism,
            precision,
            self.platform_device,
            lora=LoRAConfig(**cfg.lora),
            seed=cfg.seed,
            attention=cfg.attention,
        )
        if self.settings.packing:
            check_packing(self.built.chunks, share_prompts=self.settings.share_prompts)
        self.model = torch.nn.ModuleList(self.built.chunks)
        self.policy = MegatronPolicy(self.built, parallelism, precision, self.platform_device, cfg.loss_head)
        self.temperature = cfg.temperature
        self.engine: GenerationEngine | None = None

    # --- the loss, given by the subclass ---------------------------------------------------------------------------

    @abstractmethod
    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        """The loss's terms by name, and metrics, of a micro-batch from its log-probabilities and entropies [b, T].
        exploration_weight: what multiplies the exploration term, where the loss has one."""

    @abstractmethod
    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        """Each term's denominator: its count over a whole global batch, known before the backward pass."""

    measures_tokens = False  # whether ``token_metrics`` gives any: then ranks return their tokens' values with a step

    def token_metrics(self, batch: TrainingBatch, logprobs: Tensor, entropies: Tensor) -> dict[str, float]:
        """Metrics of a whole global batch, [B, T] each, that no sums over micro-batches give, such as percentiles."""
        return {}

    # --- the plan of a global batch --------------------------------------------------------------------------------

    def shares(self, batch: TrainingBatch, loss_counts: Mapping[str, float] | None = None) -> list[Share]:
        """Each data-parallel rank's share of a global batch. No other rank is asked."""
        ranks = parallel_state.get_data_parallel_world_size()
        required = input_shapes(get_model_config(self.built.training_chunks[0]))
        return cut(batch, self.settings, ranks, required, loss_counts)

    def loss_shares(self, batch: TrainingBatch) -> list[Share]:
        """``shares`` with the counts of the loss. Raises ValueError for a batch without any response token."""
        if not batch.mask.any():
            rows = f"the batch's {batch.size} rows"
            raise ValueError(f"none of {rows} has a response token that counts: nothing to train on")
        return self.shares(batch, self.loss_counts(batch))

    # --- training --------------------------------------------------------------------------------------------------

    def start_training(self, total_steps: int) -> None:
        """A fresh Megatron optimizer, ``cfg.training.optimizer``'s, and a schedule over ``total_steps``."""
        self.policy.reset_optimizer(self.settings.optimizer, total_steps)

    def prepare_for_training_step(self) -> None:
        self.model.train()
        self.policy.zero_grad()

    def get_loss_and_metrics(self, batch: TrainingBatch, forward_only: bool) -> tuple[float, dict[str, float]]:
        """Global means of the loss, at the configured exploration weight, and its metrics; accumulates gradients unless
        ``forward_only``."""
        share = self.loss_shares(batch)[parallel_state.get_data_parallel_rank()]
        weight = getattr(self.settings, "exploration_weight", 0.0)  # supervised training has none
        metrics, tokens = self.loss_pass(share, weight, forward_only=forward_only)
        if tokens is not None and math.isfinite(metrics["loss"]):
            metrics |= self.token_metrics(batch, *on_every_rank(share, tokens, batch.mask.shape))
        return metrics["loss"], {**metrics, "padding_share": share.padding_share}

    def loss_pass(
        self, share: Share, exploration_weight: float, *, forward_only: bool = False
    ) -> tuple[dict[str, float], Tensor | None]:
        """``forward_backward`` of the loss; tokens where the model measures them."""
        return forward_backward(
            self.policy,
            share,
            self.loss,
            exploration_weight=exploration_weight,
            temperature=self.temperature,
            forward_only=forward_only,
            keep_tokens=self.measures_tokens,
        )

    def finish_training_step(self, loss: float = 0.0, *, grad_norm_limit: float = math.inf) -> dict[str, float]:
        """Takes the optimizer step, unless the loss or the norm forbids it: ``MegatronPolicy.apply_gradients``."""
        return self.policy.apply_gradients(loss, grad_norm_limit=grad_norm_limit)

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
            raise RuntimeError("no generation engine: set model.engine before inference")
        self.model.eval()

    def infer(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """One rollout for each request, from the current weights."""
        return self.engine.generate(requests, sampling)

    def finish_inference(self) -> None:
        self.model.train()

    def get_inference_log_probs(self, batch: TrainingBatch) -> Tensor:
        """[B, T] log-probabilities of the response tokens under the current weights; zero where the mask is."""
        share = self.shares(batch)[parallel_state.get_data_parallel_rank()]
        return on_every_rank(share, logprobs_and_entropy(self.policy, share, self.temperature), batch.mask.shape)[0]

    # --- NeMo ------------------------------------------------------------------------------------------------------

    @classmethod
    def restore_from(cls, restore_path: str, *args, save_restore_connector=None, **kwargs):
        connector = save_restore_connector or MegatronSaveRestoreConnector()
        return super().restore_from(restore_path, *args, save_restore_connector=connector, **kwargs)

    @classmethod
    def list_available_models(cls) -> list:
        return []  # pretrained weights come as Hugging Face folders

    def setup_training_data(self, train_data_config) -> None:
        """Batches are handed to ``get_loss_and_metrics``; the model owns no loader."""

    def setup_validation_data(self, val_data_config) -> None:
        """Batches are handed to ``validation_step``; the model owns no loader."""


class MegatronGPTSFTModel(MegatronGPTModel):
    """Supervised fine-tuning: the negative log-likelihood of response tokens, a mean over tokens."""

    training_config = SFTConfig

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: TrainingBatch, exploration_weight: float) -> Terms:
        """See the base class; nothing explores."""
        return {"sft": sft_loss(logprobs, batch.mask)}, {}

    def loss_counts(self, batch: TrainingBatch) -> dict[str, float]:
        return {"sft": float(reduction_count(batch.mask, "token-mean"))}
