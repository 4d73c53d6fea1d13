"""Log-probabilities and entropies from logits whose vocabulary is split over processes, without gathering it.

The logits are read a chunk of positions at a time, and again in the backward pass: nothing of their size is kept or
made except their gradient, which has their type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_edo.parallel.softmax import ResultGradients, RunningSoftmax, add_columns, write_gradient

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits of a chunk: few enough for a CPU's caches, and on a GPU enough to keep it busy."""


def vocab_parallel_logprobs_and_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = True,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and the entropy of p = softmax(logits / temperature), in nats, exact over the whole vocabulary.

    logits_shard: [..., V / tp], this process's columns, whose first has the global id ``vocab_start``. Every process
        of ``group`` holds equally many, for the same positions; group None: the vocabulary is not split.
    targets: [...] int64 global ids, the same on every process. Each needs to be a real id, at padding too.
    vocab_size: columns with global ids from here on pad the embedding and have probability 0; None: there are none.
    with_entropy: False leaves the entropy out (None in its place).
    overwrite_logits: the backward pass writes the gradient over the logits. Nothing else may need them; autograd
        raises RuntimeError where they do.

    Returns [...] tensors, the same on every process, in fp32 (fp64 for fp64 logits), differentiable with respect to
    the logits. As with Megatron's own vocabulary-parallel losses, each process computes the whole loss from them,
    and its gradient reaches its own columns without communication.
    Raises ValueError for shapes that do not fit, a temperature not above 0, targets outside the vocabulary, and
    logits to overwrite that are a leaf of the graph.
    """
    if overwrite_logits and logits_shard.is_leaf and logits_shard.requires_grad:
        raise ValueError("overwrite_logits needs logits that were computed; these are a leaf of the graph")
    *positions, columns = logits_shard.shape
    vocab_size = check_arguments(targets, positions, columns, group, temperature, vocab_size)
    return _LogProbsAndEntropy.apply(
        logits_shard, targets, vocab_start, group, temperature, vocab_size, with_entropy, overwrite_logits
    )


def check_arguments(
    targets: Tensor,
    positions: Sequence[int],
    columns: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int | None,
) -> int:
    """The vocabulary's size. Raises ValueError for targets outside it or not of the shape ``positions``, and for a
    temperature not above 0."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    if list(targets.shape) != list(positions):
        raise ValueError(f"targets have shape {tuple(targets.shape)}, expected {tuple(positions)}")
    if vocab_size is None:
        vocab_size = columns * (1 if group is None else group.size())
    # Reading a GPU's tensor would wait for all that is queued: there, who makes the batch checks its ids.
    if targets.device.type == "cpu" and ((targets < 0) | (targets >= vocab_size)).any():
        raise ValueError(f"targets must be in [0, {vocab_size}), found {targets.min()} to {targets.max()}")
    return vocab_size


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocab_start, group, temperature, vocab_size, with_entropy, overwrite):
        rows, targets_here = logits.reshape(-1, logits.shape[-1]), targets.flatten() - vocab_start
        real = min(max(vocab_size - vocab_start, 0), rows.shape[1])
        softmax = RunningSoftmax.start(logits, len(rows), with_entropy)
        for chunk in _chunks(rows[:, :real]):
            add_columns(softmax[chunk], rows[chunk, :real], targets_here[chunk], temperature)
        softmax.reduce_(group)
        logprobs, entropies, log_sum_exp = softmax.results()
        ctx.save_for_backward(logits, targets_here, log_sum_exp, entropies)
        ctx.temperature, ctx.real, ctx.overwrite = temperature, real, overwrite
        ctx.set_materialize_grads(False)
        return logprobs.view(targets.shape), None if entropies is None else entropies.view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        logits, targets, log_sum_exp, entropies = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        grad = rows if ctx.overwrite else torch.empty_like(rows)
        results = ResultGradients.of(log_sum_exp, entropies, grad_logprobs, grad_entropies)
        for chunk in _chunks(rows[:, : ctx.real]):
            real = (chunk, slice(ctx.real))
            write_gradient(grad[real], rows[real], targets[chunk], ctx.temperature, results[chunk])
        if ctx.real < rows.shape[1]:
            grad[:, ctx.real :] = 0
        if ctx.overwrite:  # kernels write unseen by autograd, which then could not report a second use
            torch.autograd.graph.increment_version(logits)
        return grad.view(logits.shape), None, None, None, None, None, None, None


def _chunks(rows: Tensor) -> Iterator[slice]:
    if not rows.numel():
        return
    step = max(CHUNK_ELEMENTS[rows.device.type] // rows.shape[1], 1)
    for start in range(0, len(rows), step):
        yield slice(start, start + step)
