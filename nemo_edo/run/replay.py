"""Replays a skipped step: its batch with the weights of that step, as a whole and row by row."""

import math
from pathlib import Path

from torch import Tensor

from nemo_edo.config.compose import arm_configs
from nemo_edo.data.batching import read_batch
from nemo_edo.data.shares import Share
from nemo_edo.errors import UserError
from nemo_edo.losses import LossTerm, NotFinite, one_check
from nemo_edo.run.build import Builder
from nemo_edo.run.stored_run import open_run
from nemo_edo.run_folder import CONFIG
from nemo_edo.types import TrainingBatch
from nemo_edo.worker.remote import RemotePolicy
from nemo_edo.worker.worker import Worker

MAY_DIFFER = ("parallelism.", "precision.", "threads=")
"""Overrides that a replay takes: to see whether the numbers break in another layout or precision, too."""


def replay(path: Path, overrides: list[str]) -> None:
    """Prints what in a kept batch is not finite, row by row.

    path: ``failures/ARM_step_XXXXXXXX.safetensors`` in a run's folder, which a guard has kept. Raises UserError for
    any other file.
    """
    arm, _, step = path.stem.rpartition("_step_")
    run = path.parent.parent
    if not arm or not (run / CONFIG).is_file():
        raise UserError(f"{path} is not a batch that a run has kept: RUN/failures/ARM_step_XXXXXXXX.safetensors")
    stored = open_run(run, overrides, only=MAY_DIFFER, command="replay")
    batch, about = read_batch(path)
    training = arm_configs(stored.cfg).get(arm, stored.cfg.sft)
    model = Builder(stored.cfg, stored.folder).model(training, path.with_suffix(""))
    model.start_training(1)  # the gradient's norm is checked by the optimizer
    weight = about["metrics"].get("exploration_weight", 0.0)  # SFT has none
    print(f"step {int(step)} of {arm}, with {batch.size} responses, was not taken: {_shown(about['metrics'])}")
    measured, reasons = measure(model, weight, batch)
    print(f"now: {_shown(measured)}")
    faults = 0
    for row in range(0, batch.size, batch.unit):
        rows = batch.rows(slice(row, row + batch.unit))
        if not rows.mask.any():
            continue
        of_row, said = measure(model, weight, rows)
        found = {
            "given": [name for name, value in rows.tensors().items() if not counted(value, rows.mask).isfinite().all()],
            "computed": [name for name, value in of_row.items() if not math.isfinite(value)],
            "the loss says": said,
        }
        fault = "; ".join(f"{words}: {', '.join(names)}" for words, names in found.items() if names)
        if fault:
            faults += 1
            print(f"row {row}{f' and {row + 1}' if batch.unit == 2 else ''}: {fault}")
    if not faults:
        whole = ": they overflow together" if reasons or not all(map(math.isfinite, measured.values())) else ""
        print(f"each row by itself is finite{whole}")


def measure(model: RemotePolicy, exploration_weight: float, batch: TrainingBatch) -> tuple[dict[str, float], list[str]]:
    """(The means of the batch's log-probabilities, entropies, loss terms and metrics, and the norm of its gradient;
    a loss's messages about numbers that are not finite.)"""
    each = model.for_each_rank(model.model.loss_shares(batch))
    answers = model.workers.call(_measure_share, exploration_weight, each=each)
    return answers[0][0], sorted({reason for _, reasons in answers for reason in reasons})


def _measure_share(worker: Worker, share: Share, exploration_weight: float) -> tuple[dict[str, float], list[str]]:
    """``measure`` on a rank."""
    from nemo_edo.megatron.forward_backward import forward_backward

    model, said = worker.model, []

    def observed(logprobs: Tensor, entropies: Tensor, micro: TrainingBatch, weight: float):
        values = {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
        seen = {name: LossTerm(one[micro.mask != 0].sum(), micro.mask.sum()) for name, one in values.items()}
        try:
            with one_check():
                terms, metrics = model.loss(logprobs, entropies, micro, weight)
        except NotFinite as error:
            said.append(str(error))
            terms = dict.fromkeys(share.loss_counts, LossTerm(logprobs.sum() * math.nan, math.nan))
            metrics = {}
        return terms, {**metrics, **seen, **{f"term {name}": term.detached() for name, term in terms.items()}}

    model.prepare_for_training_step()
    means, _ = forward_backward(
        model.policy, share, observed, exploration_weight=exploration_weight, temperature=model.temperature
    )
    norm = model.policy.gradient_norm()
    return {**means, "padding_share": share.padding_share, "grad_norm": norm}, said


def counted(values: Tensor, mask: Tensor) -> Tensor:
    """Without padding, which may contain anything."""
    return values[mask != 0] if values.shape == mask.shape else values


def _shown(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float))
