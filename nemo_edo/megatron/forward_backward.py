"""Forward and backward passes over a global batch through Megatron's schedules.

The one place that divides a loss: by counts of the whole global batch, fixed before the first backward pass. A
micro-batch, a data-parallel rank or a pipeline stage adds its sums and divides by nothing, so gradients do not depend
on how a batch is split. Megatron is told to do the same (``calculate_per_token_loss`` in build.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_edo.data.batching import pad_rows
from nemo_edo.losses import LossTerm
from nemo_edo.parallel.vocab import vocab_parallel_log_probs_and_entropy
from nemo_edo.types import TrainingBatch

LossFunction = Callable[[Tensor, Tensor, TrainingBatch], tuple[LossTerm, dict[str, LossTerm]]]
"""(log-probabilities [b, T], entropies [b, T], micro-batch) -> (loss term, metrics)."""


def forward_backward(
    chunks: list[MegatronModule],
    batch: TrainingBatch,
    loss: LossFunction,
    *,
    loss_count: float,
    micro_batch_size: int,
    temperature: float,
    vocab_size: int,
    forward_only: bool = False,
) -> dict[str, float]:
    """Accumulates the gradient of ``loss.sum / loss_count`` over the global batch, reduced over all ranks.

    loss_count: the loss term's count over the global batch; the terms' own counts must add up to it.
    Returns the global means of the loss ("loss") and its metrics, the same on every rank.
    Raises FloatingPointError if the loss is not finite, before an optimizer could use its gradient.
    """

    def to_scalar(logits: Tensor, micro: TrainingBatch):
        log_probs, entropies = _log_probs_and_entropy(logits, micro, temperature, vocab_size)
        term, metrics = loss(log_probs, entropies, micro)
        sums = {name: _pair(value) for name, value in {"loss": term, **metrics}.items()}
        # The third value is a token count that Megatron would divide by; see _sum_gradients.
        return term.sum / loss_count, torch.zeros([], dtype=torch.int, device=logits.device), sums

    stored = _run_schedule(chunks, batch, to_scalar, micro_batch_size, forward_only)
    totals = _reduce_metrics(stored, batch.tokens.device)
    if abs(totals["loss"][1] - loss_count) > 1e-3 * max(loss_count, 1.0):
        raise RuntimeError(f"the loss terms count {totals['loss'][1]}, the global batch {loss_count}")
    means = {name: total / count if count else 0.0 for name, (total, count) in totals.items()}
    if not torch.isfinite(torch.tensor(means["loss"])):
        raise FloatingPointError(f"the loss is {means['loss']}; the optimizer step was not taken. Metrics: {means}")
    return means


@torch.no_grad()
def log_probs_and_entropy(
    chunks: list[MegatronModule], batch: TrainingBatch, *, micro_batch_size: int, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and exact entropies (nats) of the global batch, each [B, T] and the same on every rank."""

    def keep(logits: Tensor, micro: TrainingBatch):
        return (
            logits.new_zeros(()),
            torch.zeros([], dtype=torch.int, device=logits.device),
            (_log_probs_and_entropy(logits, micro, temperature, vocab_size)),
        )

    stored = _run_schedule(chunks, batch, keep, micro_batch_size, forward_only=True)
    result = torch.zeros(2, *batch.mask.shape, device=batch.tokens.device)
    if stored:
        rows = _share(batch.size)
        mine = torch.stack([torch.cat(part) for part in zip(*stored, strict=True)])
        result[:, rows] = mine[:, : len(rows)]  # what lies behind is padding to whole micro-batches
    torch.distributed.all_reduce(result, group=parallel_state.get_data_parallel_group())
    _broadcast_from_last_stage(result)
    return result[0], result[1]


def _log_probs_and_entropy(logits: Tensor, micro: TrainingBatch, temperature: float, vocab_size: int):
    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_parallel_log_probs_and_entropy(
        logits,
        micro.tokens[:, 1:],
        vocab_start=group.rank() * logits.shape[-1],
        group=group,
        temperature=temperature,
        vocab_size=vocab_size,
    )


def _share(size: int) -> range:
    """The rows of a global batch that this data-parallel rank takes."""
    return range(parallel_state.get_data_parallel_rank(), size, parallel_state.get_data_parallel_world_size())


def _run_schedule(chunks, batch: TrainingBatch, loss_func: Callable, micro_batch_size: int, forward_only: bool) -> list:
    """Megatron's schedule over this rank's micro-batches; returns what ``loss_func`` gave as its third value
    for each of them, on the last pipeline stage (an empty list on the others)."""
    ranks = parallel_state.get_data_parallel_world_size()
    micro_batch_size = min(micro_batch_size, -(-batch.size // ranks))
    padded = pad_rows(batch, ranks * micro_batch_size, pad_id=0)
    mine = padded.rows(torch.tensor(_share(padded.size), device=padded.tokens.device))
    micro_batches = [mine.rows(slice(i, i + micro_batch_size)) for i in range(0, mine.size, micro_batch_size)]
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = _sum_gradients
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_func=loss_func),
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=batch.tokens.shape[1] - 1,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )


def _forward_step(micro_batches: Iterator[TrainingBatch], chunk: MegatronModule, *, loss_func: Callable):
    micro = next(micro_batches)
    inputs = micro.tokens[:, :-1].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    # Right-padded rows need no attention mask: causal attention never looks ahead into the padding.
    return chunk(inputs, positions, None), partial(loss_func, micro=micro)


def _sum_gradients(model: list[MegatronModule], num_tokens: Tensor | None = None, **kwargs) -> None:
    """Megatron's reduction of gradients over ranks, without its division by a number of tokens."""
    finalize_model_grads(model, None, **kwargs)


def _pair(term: LossTerm) -> Tensor:
    return torch.stack([torch.as_tensor(part, dtype=torch.float64).detach() for part in (term.sum, term.count)])


def _reduce_metrics(stored: list[dict[str, Tensor]], device: torch.device) -> dict[str, tuple[float, float]]:
    """Adds sums and counts over micro-batches and data-parallel ranks; every pipeline stage receives them."""
    names = [sorted(stored[0]) if stored else None]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast_object_list(names, src=last, group=group)
    sums = torch.zeros(len(names[0]), 2, dtype=torch.float64, device=device)
    if stored:
        sums += sum(torch.stack([micro[name] for name in names[0]]) for micro in stored).to(device)
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    _broadcast_from_last_stage(sums)
    return {name: (float(total), float(count)) for name, (total, count) in zip(names[0], sums.tolist(), strict=True)}


def _broadcast_from_last_stage(tensor: Tensor) -> None:
    torch.distributed.broadcast(
        tensor,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
