"""What gpt_sft.py and gpt_dpo.py share: a model class from their config, and the training loop."""

from collections.abc import Sequence
from itertools import cycle, islice

import lightning.pytorch as pl
import torch
from nemo.utils.exp_manager import exp_manager
from omegaconf import DictConfig

from nemo_edo.config import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel, model_config
from nemo_edo.types import TrainingBatch


def build(kind: type[MegatronGPTModel], cfg: DictConfig) -> MegatronGPTModel:
    settings = model_config(
        cfg.model.folder,
        parallelism=ParallelismConfig(**cfg.model.parallelism),
        precision=PrecisionConfig(**cfg.model.precision),
        lora=LoRAConfig(**cfg.model.lora),
        training=kind.training_config(),
        seed=cfg.model.seed,
    )
    settings.training = cfg.model.training  # merged with the dataclass by the model class
    return kind(settings)


def train(model: MegatronGPTModel, batches: Sequence[TrainingBatch], cfg: DictConfig) -> None:
    """batches: global ones, the same on every rank; the model takes its rank's share."""
    trainer = pl.Trainer(**cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    model.start_training(trainer.max_steps)
    for step, batch in enumerate(islice(cycle(batches), trainer.max_steps)):
        model.prepare_for_training_step()
        loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
        metrics |= model.finish_training_step(loss)
        if torch.distributed.get_rank() == 0:
            print(f"step {step} loss {loss:.4f} grad_norm {metrics['grad_norm']:.3f}")
            for logger in trainer.loggers:
                logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)
    if cfg.save_to:
        model.save_to(cfg.save_to)
