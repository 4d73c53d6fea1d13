"""Replays a step that was not taken: its batch, with the weights of that moment, as a whole and row by row."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from nemo_edo import factory
from nemo_edo.configuration import arm_configs, compose_run
from nemo_edo.data.batch_file import read_batch
from nemo_edo.errors import UserError
from nemo_edo.losses import LossTerm, NotFinite
from nemo_edo.models.megatron_gpt_model import MegatronGPTModel
from nemo_edo.parallel.main_rank import is_main
from nemo_edo.run_folder import RunFolder
from nemo_edo.types import TrainingBatch

MAY_DIFFER = ("parallelism.", "precision.", "threads=")
"""Overrides that a replay takes: to see whether the numbers break in another layout or precision, too."""


def replay(path: Path, overrides: list[str]) -> None:
    """Prints what of a kept batch is not finite, row by row.

    path: ``failures/ARM_step_XXXXXXXX.safetensors`` in a run's folder, which a guard has kept. Raises UserError for
    any other file.
    """
    strange = [override for override in overrides if not override.startswith(MAY_DIFFER)]
    if strange:
        raise UserError(f"replay takes overrides of parallelism.*, precision.* and threads only: {', '.join(strange)}")
    arm, _, step = path.stem.rpartition("_step_")
    run = path.parent.parent
    if not arm or not (run / "config.yaml").is_file():
        raise UserError(f"{path} is not a batch that a run has kept: RUN/failures/ARM_step_XXXXXXXX.safetensors")
    batch, about = read_batch(path)
    model = _model(run, arm, overrides, path.with_suffix(""), about["metrics"].get("exploration_weight"))
    _say(f"step {int(step)} of {arm}, with {batch.size} responses, was not taken: {_shown(about['metrics'])}")
    measured, reasons = measure(model, batch)
    _say(f"now: {_shown(measured)}")
    faults = 0
    for row in range(0, batch.size, batch.unit):
        rows = batch.rows(slice(row, row + batch.unit))
        if rows.mask.any() and (fault := _fault(model, rows)):
            faults += 1
            _say(f"row {row}{f' and {row + 1}' if batch.unit == 2 else ''}: {fault}")
    if not faults:
        whole = ": they overflow together" if reasons or not all(map(math.isfinite, measured.values())) else ""
        _say(f"each row by itself is finite{whole}")


def measure(model: MegatronGPTModel, batch: TrainingBatch) -> tuple[dict[str, float], list[str]]:
    """(The means of the batch's log-probabilities, entropies, loss terms and metrics, and the norm of its gradient;
    what a loss says of numbers that are not finite.)"""
    said: list[str] = []

    def loss(log_probs: Tensor, entropies: Tensor, micro: TrainingBatch):
        seen = {"log_probs": _sum(log_probs, micro), "entropies": _sum(entropies, micro)}
        try:
            terms, metrics = model.loss(log_probs, entropies, micro)
        except NotFinite as error:
            said.append(str(error))
            terms = dict.fromkeys(model.loss_counts(batch), LossTerm(log_probs.sum() * math.nan, math.nan))
            metrics = {}
        return terms, {**metrics, **seen, **{f"term {name}": term.detached() for name, term in terms.items()}}

    model.prepare_for_training_step()
    metrics = model.policy.forward_backward(
        batch,
        loss,
        loss_counts=model.loss_counts(batch),
        micro_batching=model.micro_batching,
        temperature=model.temperature,
    )
    reasons: list[list[str]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, said)
    return {**metrics, "grad_norm": model.policy.gradient_norm()}, sorted({r for part in reasons for r in part})


def _fault(model: MegatronGPTModel, rows: TrainingBatch) -> str:
    """What of a row (a pair) is not finite; empty where all is."""
    measured, reasons = measure(model, rows)
    given = [name for name, value in rows.tensors().items() if not _finite(value, rows.mask)]
    computed = [name for name, value in measured.items() if not math.isfinite(value)]
    parts = {"given": given, "computed": computed, "the loss says": reasons}
    return "; ".join(f"{words}: {', '.join(found)}" for words, found in parts.items() if found)


def _finite(values: Tensor, mask: Tensor) -> bool:
    """Padding may hold anything."""
    counted = values[mask != 0] if values.shape == mask.shape else values
    return bool(torch.isfinite(counted).all())


def _sum(values: Tensor, micro: TrainingBatch) -> LossTerm:
    return LossTerm(values.detach()[micro.mask != 0].sum(), micro.mask.sum())


def _model(
    run: Path, arm: str, overrides: list[str], weights: Path, exploration_weight: float | None
) -> MegatronGPTModel:
    cfg = compose_run("config", overrides, config_dir=run)
    model = factory.build_model(cfg, RunFolder(run), arm_configs(cfg).get(arm, cfg.sft), weights=weights)
    model.start_training(1)  # the gradient's norm is the optimizer's to tell
    if exploration_weight is not None:
        model.exploration_weight = exploration_weight
    return model


def _shown(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float))


def _say(message: str) -> None:
    if is_main():
        print(message)
