"""Token ids to training batches, and the order in which an epoch visits them. Integers and tensors only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_edo.types import TrainingBatch

T = TypeVar("T")
PromptAndResponse = tuple[Sequence[int], Sequence[int]]


def build_batch(
    sequences: Sequence[PromptAndResponse],
    *,
    pad_id: int,
    length: int | None = None,
    advantages: Sequence[float] | None = None,
    old_logprobs: Sequence[Sequence[float]] | None = None,
    ref_logprobs: Sequence[Sequence[float]] | None = None,
) -> TrainingBatch:
    """One row for each (prompt ids, response ids), right-padded to ``length`` (None: the longest sequence).

    The mask is 1 at the R positions that predict a response's R tokens, the first of which is the prompt's last.
    ``advantages`` holds one number a response; ``old_logprobs`` and ``ref_logprobs`` one for each response token.

    Raises ValueError for no sequences, an empty prompt (nothing would predict the first response token), a sequence
    longer than ``length``, or values that do not match the responses.
    """
    if not sequences:
        raise ValueError("no sequences to make a batch of")
    longest = max(len(prompt) + len(response) for prompt, response in sequences)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"the longest sequence has {longest} tokens, expected at most length = {length}")
    if advantages is not None and len(advantages) != len(sequences):
        raise ValueError(f"{len(advantages)} advantages for {len(sequences)} responses, expected one each")
    tokens = torch.full((len(sequences), length), pad_id, dtype=torch.int64)
    for row, (prompt, response) in enumerate(sequences):
        tokens[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response], dtype=torch.int64)
    ones = [[1.0] * len(response) for _, response in sequences]

    def placed(values: Sequence[Sequence[float]] | None) -> Tensor | None:
        return None if values is None else place_on_responses(values, sequences, length)

    return TrainingBatch(
        tokens=tokens,
        mask=place_on_responses(ones, sequences, length),
        advantages=None if advantages is None else torch.tensor(advantages, dtype=torch.float32),
        old_logprobs=placed(old_logprobs),
        ref_logprobs=placed(ref_logprobs),
    )


def place_on_responses(
    values: Sequence[Sequence[float]], sequences: Sequence[PromptAndResponse], length: int
) -> Tensor:
    """[B, T = length - 1] float32: a value for each response token, at the position that predicts it; 0 elsewhere.

    Raises ValueError for an empty prompt, or a number of values other than the response's number of tokens.
    """
    placed = torch.zeros(len(sequences), length - 1)
    for row, (row_values, (prompt, response)) in enumerate(zip(values, sequences, strict=True)):
        if not prompt:
            raise ValueError(f"sequence {row} has an empty prompt, expected at least one token before the response")
        if len(row_values) != len(response):
            raise ValueError(f"sequence {row} has {len(row_values)} values for {len(response)} response tokens")
        start = len(prompt) - 1
        placed[row, start : start + len(response)] = torch.tensor(row_values, dtype=torch.float32)
    return placed


def pad_rows(batch: TrainingBatch, multiple: int, *, pad_id: int) -> TrainingBatch:
    """The batch with rows that are all padding (zeros in every other field) up to a multiple of ``multiple`` rows."""
    missing = -batch.size % multiple

    def grown(name: str, value: Tensor) -> Tensor:
        at_the_end = (0, 0) * (value.dim() - 1) + (0, missing)
        return F.pad(value, at_the_end, value=pad_id if name == "tokens" else 0)

    return TrainingBatch(**{name: grown(name, value) for name, value in batch.tensors().items()})


def epoch_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(num_items) that the seed and the epoch fix, the same on every rank."""
    order = list(range(num_items))
    random.Random(f"{seed}, epoch {epoch}").shuffle(order)  # a text, so that (1, 2) and (2, 1) are other orders
    return order


def minibatches(order: Sequence[T], size: int) -> list[list[T]]:
    """The items cut into pieces of ``size``; the last one holds what remains, so that no sample is left out."""
    if size < 1:
        raise ValueError(f"the minibatch size is {size}, expected at least 1")
    return [list(order[start : start + size]) for start in range(0, len(order), size)]
