"""NeMo's experiment manager: TensorBoard, W&B or MLflow by its own config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf


def start_tracking(settings: dict[str, Any], folder: Path) -> pl.Trainer:
    """A Lightning trainer with the loggers that ``settings`` ask NeMo's exp_manager for. It trains nothing itself."""
    trainer = pl.Trainer(accelerator="auto", devices=1, logger=False, enable_checkpointing=False, max_steps=1)
    config = {"explicit_log_dir": str(folder), "create_checkpoint_callback": False, **settings}
    exp_manager(trainer, OmegaConf.create(config))
    return trainer


def log_numbers(trainer: pl.Trainer | None) -> Callable[[dict[str, float], int], None]:
    """A function that hands numbers and their step to every logger of the trainer (None: to no logger)."""

    def log(numbers: dict[str, float], step: int) -> None:
        for logger in trainer.loggers if trainer is not None else ():
            logger.log_metrics(numbers, step=step)

    return log
