"""Token ids to training batches, and the order in which an epoch visits them. Integers and tensors only."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_edo.data.packs import Prompts, split_into_packs
from nemo_edo.types import TrainingBatch

T = TypeVar("T")
PromptAndResponse = tuple[Sequence[int], Sequence[int]]


def build_batch(
    sequences: Sequence[PromptAndResponse],
    *,
    pad_id: int,
    length: int | None = None,
    **logprobs: Sequence[Sequence[float]],
) -> TrainingBatch:
    """One row for each (prompt ids, response ids), right-padded to ``length`` (None: the longest sequence).

    The mask is 1 at the R positions that predict a response's R tokens, the first of which is the prompt's last.
    logprobs: one per response token, of the batch's fields old_logprobs, ref_logprobs and sampler_logprobs.
    """
    sizes = [len(prompt) + len(response) for prompt, response in sequences]
    length = max(sizes) if length is None else length
    tokens = torch.full((len(sequences), length), pad_id, dtype=torch.int64)
    _fill_spans(tokens, [0] * len(sequences), sizes, [part for sequence in sequences for part in sequence])
    values = {name: place_on_responses(rows, sequences, length) for name, rows in logprobs.items()}
    mask = place_on_responses([[1.0] * len(response) for _, response in sequences], sequences, length)
    return TrainingBatch(tokens=tokens, mask=mask, **values)


def place_on_responses(
    values: Sequence[Sequence[float]], sequences: Sequence[PromptAndResponse], length: int
) -> Tensor:
    """[B, T = length - 1] float32: a value for each response token, at the position that predicts it; 0 elsewhere."""
    placed = torch.zeros(len(sequences), length - 1)
    sizes = [len(response) for _, response in sequences]
    _fill_spans(placed, [len(prompt) - 1 for prompt, _ in sequences], sizes, values)
    return placed


def place_experts(rows: Sequence[bytes], sequences: Sequence[PromptAndResponse], length: int) -> Tensor | None:
    """[B, T = length - 1, layers * k] int16: ``Rollout.routed_experts`` of each sequence; None where they have none.

    Raises ValueError where some have them and others do not, or other numbers of layers and experts."""
    inputs = [len(prompt) + len(response) - 1 for prompt, response in sequences]
    widths = {len(experts) / count for experts, count in zip(rows, inputs, strict=True)}
    if widths == {0}:
        return None
    if len(widths) > 1:
        raise ValueError(f"the rollouts keep {sorted(widths)} bytes of experts a token, expected one number for all")
    placed = torch.zeros(len(rows), length - 1, int(widths.pop()) // 2, dtype=torch.int16)
    for row, experts, count in zip(placed, rows, inputs, strict=True):
        row[:count] = torch.frombuffer(bytearray(experts), dtype=torch.int16).view(count, -1)
    return placed


def _fill_spans(rows: Tensor, starts: list[int], lengths: list[int], values: Iterable[Sequence[float]]) -> None:
    """Writes the values, row after row, into the ``lengths`` elements of each row from its start."""
    start, length = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    column = torch.arange(rows.shape[1])
    flat = np.fromiter(chain.from_iterable(values), np.float32 if rows.is_floating_point() else np.int64)
    rows[(column >= start) & (column < start + length)] = torch.from_numpy(flat)


def sequence_lengths(batch: TrainingBatch) -> list[int]:
    """For each row, its tokens up to the last one that counts, at least 2; the rest is padding."""
    positions = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device)
    return ((batch.mask != 0) * positions).amax(dim=1).add(1).clamp(min=2).tolist()


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    ranks: int,
    rows: int,
    tokens: int | None = None,
    unit: int = 1,
    packing: bool = False,
    prompts: Prompts | None = None,
) -> list[list[list[int]]]:
    """For each data-parallel rank its micro-batches, each a list of rows: as many on every rank, and some may be empty.

    lengths: tokens of each row of the global batch. rows: at most this many per micro-batch. tokens: at most this
    many per micro-batch, padding included; rows of similar length then share one. unit: consecutive rows that stay
    together.
    packing: rows are packed, as many as ``tokens`` allows, whatever ``rows`` says. prompts: shared by rows of a pack,
    which stores each prompt once; rows of one prompt are then consecutive.
    Raises ValueError where ``rows`` or ``tokens`` has no room for a unit, or units do not divide the rows.
    """
    if packing:
        return split_into_packs(lengths, ranks, tokens, unit, prompts)
    if rows < unit or len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows in micro-batches of {rows} cannot keep {unit} rows together")
    longest = [max(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
    order = list(range(len(longest)))
    if tokens is not None:
        if max(longest, default=0) * unit > tokens:
            raise ValueError(f"{unit} rows of {max(longest)} tokens exceed the {tokens} tokens of a micro-batch")
        order.sort(key=lambda index: -longest[index])  # stable: the plan is the same on every rank
    plans = [_fill(order[rank::ranks], longest, rows // unit, tokens, unit) for rank in range(ranks)]
    most = max(len(plan) for plan in plans)
    return [plan + [[]] * (most - len(plan)) for plan in plans]


def _fill(order: list[int], longest: list[int], units: int, tokens: int | None, unit: int) -> list[list[int]]:
    """Micro-batches of consecutive units, each as full as it may be."""
    micro_batches: list[list[int]] = []
    width = 0
    for index in order:
        here = len(micro_batches[-1]) // unit if micro_batches else units
        width = max(width, longest[index])
        if here == units or (tokens is not None and (here + 1) * unit * width > tokens):
            micro_batches.append([])
            width = longest[index]
        micro_batches[-1].extend(range(index * unit, (index + 1) * unit))
    return micro_batches


def input_shape(lengths: Sequence[int], *, packing: bool, saved: int = 0) -> tuple[int, int]:
    """[rows, length] of what the model sees of a micro-batch with rows of these lengths: all tokens but the last.
    saved: tokens of a pack that are stored once for several rows."""
    inputs = [length - 1 for length in lengths]
    return (1, sum(inputs) - saved) if packing else (len(inputs), max(inputs))


def padding_share(lengths: Sequence[int], shapes: Iterable[tuple[int, int]], saved: int = 0) -> float:
    """Share of padding among the tokens that forward passes of these input shapes compute."""
    return 1 - (sum(lengths) - len(lengths) - saved) / sum(rows * length for rows, length in shapes)


def take_rows(batch: TrainingBatch, rows: Sequence[int], length: int) -> TrainingBatch:
    """The given rows, cut to ``length`` tokens; without any, rows that are all padding (``batch.unit`` of them)."""
    if not rows:
        empty = batch.rows(slice(0, batch.unit)).cut(length)
        return TrainingBatch(**{name: torch.zeros_like(value) for name, value in empty.tensors().items()})
    return batch.rows(torch.tensor(rows, device=batch.tokens.device)).cut(length)


def epoch_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(num_items), determined by the seed and the epoch, the same on every rank."""
    order = list(range(num_items))
    random.Random(f"{seed}, epoch {epoch}").shuffle(order)  # a text, so that (1, 2) and (2, 1) differ
    return order


def minibatches(order: Sequence[T], size: int) -> list[list[T]]:
    """The items cut into pieces of ``size``; the last one holds what remains, so that no sample is left out."""
    if size < 1:
        raise ValueError(f"the minibatch size is {size}, expected at least 1")
    return [list(order[start : start + size]) for start in range(0, len(order), size)]
