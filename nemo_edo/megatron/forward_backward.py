"""Forward and backward passes over a global batch through Megatron's schedules.

The one place that divides a loss: by counts of the whole global batch, fixed before the first backward pass. A
micro-batch, a data-parallel rank or a pipeline stage adds its sums and divides by nothing, so gradients do not depend
on how a batch is split. Megatron is told to do the same (``calculate_per_token_loss`` in build.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_edo.data.batching import padding_share, plan_micro_batches, sequence_lengths, take_rows
from nemo_edo.losses import LossTerm
from nemo_edo.parallel.vocab import vocab_parallel_log_probs_and_entropy
from nemo_edo.types import TrainingBatch

TERM = "term:"
"""Before the names of the loss's terms, among the metrics."""

LossFunction = Callable[[Tensor, Tensor, TrainingBatch], tuple[dict[str, LossTerm], dict[str, LossTerm]]]
"""(log-probabilities [b, T], entropies [b, T], micro-batch) -> (terms of the loss by name, metrics)."""


@dataclass(frozen=True)
class MicroBatching:
    """How a rank's share of a global batch is cut: memory and speed, never the result."""

    rows: int
    """At most so many to a micro-batch."""
    tokens: int | None = None
    """At most so many, padding included; None: no such bound, and rows stay in their order."""


def forward_backward(
    chunks: list[MegatronModule],
    batch: TrainingBatch,
    loss: LossFunction,
    *,
    loss_counts: Mapping[str, float],
    micro_batching: MicroBatching,
    temperature: float,
    vocab_size: int,
    forward_only: bool = False,
) -> dict[str, float]:
    """Accumulates the gradient of the loss over the global batch, reduced over all ranks.

    The loss is the sum over its terms of term.sum / loss_counts[name]: each has a denominator of its own.
    loss_counts: for each term its count over the global batch; the micro-batches' counts must add up to it.
    Returns the global means of the loss ("loss") and its metrics, the same on every rank, and "padding_share".
    Raises FloatingPointError if the loss is not finite, before an optimizer could use its gradient, and ValueError
    for a batch without any response token.
    """
    if not batch.mask.any():
        raise ValueError(f"none of the batch's {batch.size} rows has a response token that counts: nothing to train on")

    def to_scalar(logits: Tensor, micro: TrainingBatch):
        log_probs, entropies = _log_probs_and_entropy(logits, micro, temperature, vocab_size)
        if not micro.mask.any():  # padding alone: it keeps the ranks in step, and no loss is asked for it
            return log_probs.sum() * 0.0, torch.zeros([], dtype=torch.int, device=logits.device), {}
        terms, metrics = loss(log_probs, entropies, micro)
        total = sum(terms[name].sum / max(count, 1.0) for name, count in loss_counts.items())
        sums = {name: _pair(value) for name, value in metrics.items()}
        sums |= {f"{TERM}{name}": _pair(term) for name, term in terms.items()}
        # The second value is a token count that Megatron would divide by; see _sum_gradients.
        return total, torch.zeros([], dtype=torch.int, device=logits.device), sums

    lengths, plans = _plan(batch, micro_batching)
    stored = _run_schedule(chunks, batch, lengths, plans, to_scalar, forward_only)
    totals = _reduce_metrics(stored, batch.tokens.device)
    means = _means(totals, loss_counts)
    if not math.isfinite(means["loss"]):
        raise FloatingPointError(f"the loss is {means['loss']}; the optimizer step was not taken. Metrics: {means}")
    return {**means, "padding_share": padding_share(lengths, plans)}


@torch.no_grad()
def log_probs_and_entropy(
    chunks: list[MegatronModule],
    batch: TrainingBatch,
    *,
    micro_batching: MicroBatching,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and exact entropies (nats) of the global batch, each [B, T] and the same on every rank.

    Zero behind a row's last response token.
    """

    def keep(logits: Tensor, micro: TrainingBatch):
        return (
            logits.new_zeros(()),
            torch.zeros([], dtype=torch.int, device=logits.device),
            (_log_probs_and_entropy(logits, micro, temperature, vocab_size)),
        )

    lengths, plans = _plan(batch, micro_batching)
    stored = _run_schedule(chunks, batch, lengths, plans, keep, forward_only=True)
    result = torch.zeros(2, *batch.mask.shape, device=batch.tokens.device)
    if stored:
        for rows, values in zip(plans[parallel_state.get_data_parallel_rank()], stored, strict=True):
            for place, row in enumerate(rows):
                result[:, row, : lengths[row] - 1] = torch.stack(values)[:, place, : lengths[row] - 1]
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


def _plan(batch: TrainingBatch, micro_batching: MicroBatching) -> tuple[list[int], list[list[list[int]]]]:
    """The rows' lengths, and every data-parallel rank's micro-batches."""
    lengths = sequence_lengths(batch)
    ranks = parallel_state.get_data_parallel_world_size()
    plans = plan_micro_batches(
        lengths, ranks=ranks, rows=micro_batching.rows, tokens=micro_batching.tokens, unit=batch.unit
    )
    return lengths, plans


def _run_schedule(
    chunks, batch: TrainingBatch, lengths: list[int], plans, loss_func: Callable, forward_only: bool
) -> list:
    """Megatron's schedule over this rank's micro-batches; returns what ``loss_func`` gave as its third value
    for each of them, on the last pipeline stage (an empty list on the others)."""
    plan = plans[parallel_state.get_data_parallel_rank()]
    widths = [max((lengths[row] for row in rows), default=2) for rows in plan]
    micro_batches = [take_rows(batch, rows, width) for rows, width in zip(plan, widths, strict=True)]
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = _sum_gradients
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_func=loss_func),
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        # Micro-batches differ in both; pipeline stages tell each other the shapes (variable_seq_lengths in build.py).
        seq_length=max(widths) - 1,
        micro_batch_size=max(micro.size for micro in micro_batches),
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


def _means(totals: dict[str, tuple[float, float]], loss_counts: Mapping[str, float]) -> dict[str, float]:
    """Global means, the loss's terms added up; RuntimeError where their counts are not those of the global batch."""
    for name, expected in loss_counts.items():
        found = totals[TERM + name][1]
        if abs(found - expected) > 1e-3 * max(expected, 1.0):
            raise RuntimeError(f"the micro-batches' terms {name!r} count {found}, the global batch {expected}")
    means = {name: total / count if count else 0.0 for name, (total, count) in totals.items()}
    terms = [means.pop(TERM + name) for name in loss_counts]
    return {"loss": math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan, **means}


def _pair(term: LossTerm) -> Tensor:
    return torch.stack([torch.as_tensor(part, dtype=torch.float64).detach() for part in (term.sum, term.count)])


def _reduce_metrics(stored: list[dict[str, Tensor]], device: torch.device) -> dict[str, tuple[float, float]]:
    """Adds sums and counts over micro-batches and data-parallel ranks; every pipeline stage receives them."""
    names = _metric_names(stored)
    nothing = torch.zeros(2, dtype=torch.float64)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for micro in stored:
        sums += torch.stack([micro.get(name, nothing).to(device) for name in names])
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    _broadcast_from_last_stage(sums)
    return {name: (float(total), float(count)) for name, (total, count) in zip(names, sums.tolist(), strict=True)}


def _metric_names(stored: list[dict[str, Tensor]]) -> list[str]:
    """Those of any micro-batch of any rank: a rank whose rows are padding alone has none of its own."""
    group = parallel_state.get_data_parallel_group()
    found: list[set[str]] = [set()] * group.size()
    torch.distributed.all_gather_object(found, {name for micro in stored for name in micro}, group=group)
    names = [sorted(set().union(*found))]
    torch.distributed.broadcast_object_list(
        names,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return names[0]


def _broadcast_from_last_stage(tensor: Tensor) -> None:
    torch.distributed.broadcast(
        tensor,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
