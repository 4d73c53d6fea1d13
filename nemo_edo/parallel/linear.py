"""Log-probabilities and entropies straight from hidden states and output weights, without ever storing the logits.

Logits are made a block of vocabulary columns at a time, added to an online softmax and dropped; the backward pass
makes them again. With N positions it costs a fourth matrix product on top of the three of a plain output layer, and
saves all that has the size N x vocabulary. Blocks are of columns and not of positions, so that each row of the
weights' gradient is one product, summed in the precision of the matrix product and written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_edo.parallel.softmax import ResultGradients, RunningSoftmax, add_columns, write_gradient
from nemo_edo.parallel.vocab import check_arguments

BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits of a block: what is in memory at a time, and enough for matrix products at full speed. On a CPU the threads
wait for each other several times in every block: smaller ones take longer the more other work the machine has."""
MIN_COLUMNS = 128
"""Fewest columns of a block, however many positions there are: every block reads all hidden states."""


def linear_logprobs_and_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and the entropy of p = softmax(hidden W^T / temperature), in nats, over the whole vocabulary.

    hidden: [..., H], the same on every process. weight_shard: [V / tp, H], this process's rows of W, of the same type;
        the other arguments and the results are those of ``vocab_parallel_logprobs_and_entropy``.

    The matrix products have the inputs' type, sums and results are in fp32 (fp64 for fp64). The gradient of
    ``hidden`` is the part that this process's rows contribute: as with Megatron's column-parallel layer without its
    own reduction, it has to be summed over ``group``. ``weight_shard``'s is complete.
    Raises ValueError as ``vocab_parallel_logprobs_and_entropy`` does, and where the two types differ.
    """
    if hidden.dtype != weight_shard.dtype:
        raise ValueError(f"hidden has type {hidden.dtype}, weight_shard {weight_shard.dtype}")
    if hidden.shape[-1] != weight_shard.shape[1]:
        raise ValueError(f"hidden has {hidden.shape[-1]} features, weight_shard {weight_shard.shape[1]}")
    vocab_size = check_arguments(targets, hidden.shape[:-1], len(weight_shard), group, temperature, vocab_size)
    return _LinearLogProbsAndEntropy.apply(
        hidden, weight_shard, targets, vocab_start, group, temperature, vocab_size, with_entropy
    )


class _LinearLogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_start, group, temperature, vocab_size, with_entropy):
        rows, targets_here = hidden.reshape(-1, hidden.shape[-1]), targets.flatten() - vocab_start
        real = min(max(vocab_size - vocab_start, 0), len(weight))
        softmax = RunningSoftmax.start(rows, len(rows), with_entropy)
        for columns, logits in _blocks(rows, weight[:real]):
            add_columns(softmax, logits, targets_here - columns.start, temperature, overwrite=True)
        softmax.reduce_(group)
        logprobs, entropies, log_sum_exp = softmax.results()
        ctx.save_for_backward(hidden, weight, targets_here, log_sum_exp, entropies)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)
        return logprobs.view(targets.shape), None if entropies is None else entropies.view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, targets, log_sum_exp, entropies = ctx.saved_tensors
        rows, real = hidden.reshape(-1, hidden.shape[-1]), weight[: ctx.real]
        results = ResultGradients.of(log_sum_exp, entropies, grad_logprobs, grad_entropies)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(rows, dtype=log_sum_exp.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        for columns, logits in _blocks(rows, real):
            write_gradient(logits, logits, targets - columns.start, ctx.temperature, results)
            if need_weight:
                torch.mm(logits.t(), rows, out=grad_weight[columns])
            if need_hidden:
                _add_product(grad_hidden, logits, real[columns])
        if need_weight:
            grad_weight[ctx.real :] = 0
        if need_hidden:
            grad_hidden = grad_hidden.to(hidden.dtype).view(hidden.shape)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _blocks(rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(columns, their logits [N, C]) in turn, all in one piece of memory."""
    width = min(max(BLOCK_ELEMENTS[rows.device.type] // max(len(rows), 1), MIN_COLUMNS), len(weight))
    memory = rows.new_empty(len(rows) * width)
    for start in range(0, len(weight), max(width, 1)):
        columns = slice(start, min(start + width, len(weight)))
        logits = memory[: len(rows) * (columns.stop - start)].view(len(rows), columns.stop - start)
        torch.mm(rows, weight[columns].t(), out=logits)
        yield columns, logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right. A product of 16-bit numbers is rounded to their type; the sum over blocks is not."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
