"""Log-probabilities and entropies over a vocabulary that may be split over processes, without gathering it.

From logits: these are read a chunk of positions at a time, and again in the backward pass; nothing of their size is
kept or made except their gradient, which has their type.

Straight from hidden states and output weights, without ever storing the logits: they are made a block of vocabulary
columns at a time, added to an online softmax and dropped; the backward pass makes them again. With N positions it costs
a fourth matrix product on top of the three of a plain output layer, and saves all that has the size N x vocabulary.
Blocks are of columns and not of positions, so that each row of the weights' gradient is one product, summed in the
precision of the matrix product and written once.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_edo.parallel.softmax_state import FLOOR, ResultGradients, RunningSoftmax, compute_dtype

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits of a chunk: few enough for a CPU's caches, and on a GPU enough to keep it busy."""
BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits of a block: what is in memory at a time, and enough for matrix products at full speed. On a CPU the threads
wait for each other several times in every block: smaller ones take longer the more other work the machine has."""
MIN_COLUMNS = 128  # fewest columns of a block, however many positions there are: every block reads all hidden states


def vocab_parallel_logprobs_and_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p = softmax(logits / temperature), in nats, exact over the whole vocabulary.

    logits_shard: [..., V / tp], this process's columns, whose first has the global id ``vocab_start``. Every process
        of ``group`` holds equally many, for the same positions; group None: the vocabulary is not split.
    targets: [...] int64 global ids, the same on every process. Each needs to be a real id, at padding too.
    vocab_size: columns with global ids from here on pad the embedding and have probability 0; None: there are none.
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
    real = _real_columns(targets, positions, columns, vocab_start, group, temperature, vocab_size)
    return _OfLogits.apply(logits_shard, targets, targets - vocab_start, group, temperature, real, overwrite_logits)


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Exact entropy in nats of p = softmax(logits / temperature) over the last dimension: [..., V] -> [...].

    H = -sum_v p_v log p_v, from 0 to log V. Computed and returned in fp32 for half-precision logits, otherwise in
    the logits' type; differentiable once. A logit of -inf is an outcome of probability 0. No copy of the logits in fp32
    is made, only of one chunk; the backward pass makes the gradient, in the logits' type.
    Raises ValueError for no vocabulary, logits that are not floating, NaN, +inf or -inf alone at a position, and a
    temperature that is not positive.
    """
    single = torch.finfo(torch.float32)
    if not single.tiny <= temperature <= single.max:
        raise ValueError(f"temperature is {temperature}, expected a number above 0, within the range of fp32")
    if logits.ndim == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating [..., V], V > 0")
    highest = logits.detach().amax(dim=-1)
    wrong = highest[~torch.isfinite(highest)]
    if wrong.numel():
        found = "NaN" if wrong.isnan().any() else "+inf" if wrong.isposinf().any() else "nothing but -inf"
        raise ValueError(f"logits hold {found}; {wrong.numel()} of {highest.numel()} positions have no distribution")
    no_target = torch.zeros_like(highest, dtype=torch.int64)
    return vocab_parallel_logprobs_and_entropy(logits, no_target, vocab_start=0, group=None, temperature=temperature)[1]


def linear_logprobs_and_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p = softmax(hidden W^T / temperature), in nats, over the whole vocabulary.

    hidden: [..., H], the same on every process. weight_shard: [V / tp, H], this process's rows of W, of the same type;
        the other arguments and the results are those of ``vocab_parallel_logprobs_and_entropy``.

    The matrix products have the inputs' type, sums and results are in fp32 (fp64 for fp64). The gradient of
    ``hidden`` is the part that this process's rows contribute: as with Megatron's column-parallel layer without its
    own reduction, it has to be summed over ``group``. ``weight_shard``'s is complete.
    Raises ValueError as ``vocab_parallel_logprobs_and_entropy`` does.
    """
    positions, columns = hidden.shape[:-1], len(weight_shard)
    real = _real_columns(targets, positions, columns, vocab_start, group, temperature, vocab_size)
    return _OfHiddenStates.apply(hidden, weight_shard, targets, targets - vocab_start, group, temperature, real)


def _real_columns(
    targets: Tensor,
    positions: Sequence[int],
    columns: int,
    vocab_start: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int | None,
) -> int:
    """How many of this process's columns are no padding, once the arguments are checked."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected a number above 0")
    if list(targets.shape) != list(positions):
        raise ValueError(f"targets have shape {tuple(targets.shape)}, expected {tuple(positions)}")
    if vocab_size is None:
        vocab_size = columns * (1 if group is None else group.size())
    # Reading a GPU's tensor would wait for all that is queued: there, who makes the batch checks its ids.
    if targets.device.type == "cpu" and ((targets < 0) | (targets >= vocab_size)).any():
        raise ValueError(f"targets must be in [0, {vocab_size}), found {targets.min()} to {targets.max()}")
    return min(max(vocab_size - vocab_start, 0), columns)


class _OfLogits(torch.autograd.Function):
    """local: the targets' columns on this process. real: how many of its columns are no padding."""

    @staticmethod
    def forward(ctx, logits, targets, local, group, temperature, real, overwrite):
        rows, local = logits.reshape(-1, logits.shape[-1]), local.flatten()
        softmax = RunningSoftmax.start(logits, len(rows))
        for chunk in _chunks(rows[:, :real]):
            add_columns(softmax[chunk], rows[chunk, :real], local[chunk], temperature)
        softmax.reduce_(group)
        logprobs, entropies, log_sum_exp = softmax.results()
        ctx.save_for_backward(logits, local, log_sum_exp, entropies)
        ctx.temperature, ctx.real, ctx.overwrite = temperature, real, overwrite
        ctx.set_materialize_grads(False)
        return logprobs.view(targets.shape), entropies.view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        logits, local, log_sum_exp, entropies = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        grad = rows if ctx.overwrite else torch.empty_like(rows)
        results = ResultGradients.of(log_sum_exp, entropies, grad_logprobs, grad_entropies)
        for chunk in _chunks(rows[:, : ctx.real]):
            real = (chunk, slice(ctx.real))
            write_gradient(grad[real], rows[real], local[chunk], ctx.temperature, results[chunk])
        if ctx.real < rows.shape[1]:
            grad[:, ctx.real :] = 0
        if ctx.overwrite:  # kernels write unseen by autograd, which then could not report a second use
            torch.autograd.graph.increment_version(logits)
        return grad.view(logits.shape), None, None, None, None, None, None


def _chunks(rows: Tensor) -> Iterator[slice]:
    if not rows.numel():
        return
    step = max(CHUNK_ELEMENTS[rows.device.type] // rows.shape[1], 1)
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


class _OfHiddenStates(torch.autograd.Function):
    """local, real: as for ``_OfLogits``."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, local, group, temperature, real):
        rows, local = hidden.reshape(-1, hidden.shape[-1]), local.flatten()
        softmax = RunningSoftmax.start(rows, len(rows))
        for columns, logits in _blocks(rows, weight[:real]):
            add_columns(softmax, logits, local - columns.start, temperature, overwrite=True)
        softmax.reduce_(group)
        logprobs, entropies, log_sum_exp = softmax.results()
        ctx.save_for_backward(hidden, weight, local, log_sum_exp, entropies)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)
        return logprobs.view(targets.shape), entropies.view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, local, log_sum_exp, entropies = ctx.saved_tensors
        rows, real = hidden.reshape(-1, hidden.shape[-1]), weight[: ctx.real]
        results = ResultGradients.of(log_sum_exp, entropies, grad_logprobs, grad_entropies)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(rows, dtype=log_sum_exp.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        for columns, logits in _blocks(rows, real):
            write_gradient(logits, logits, local - columns.start, ctx.temperature, results)
            if need_weight:
                torch.mm(logits.t(), rows, out=grad_weight[columns])
            if need_hidden and grad_hidden.dtype == logits.dtype:
                grad_hidden.addmm_(logits, real[columns])
            elif need_hidden:  # a product of 16-bit numbers is rounded to their type; the sum over blocks is not
                grad_hidden.add_(logits @ real[columns])
        if need_weight:
            grad_weight[ctx.real :] = 0
        if need_hidden:
            grad_hidden = grad_hidden.to(hidden.dtype).view(hidden.shape)
        return grad_hidden, grad_weight, None, None, None, None, None


def _blocks(rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(columns, their logits [N, C]) in turn, all in one piece of memory."""
    width = min(max(BLOCK_ELEMENTS[rows.device.type] // max(len(rows), 1), MIN_COLUMNS), len(weight))
    memory = rows.new_empty(len(rows) * width)
    for start in range(0, len(weight), max(width, 1)):
        columns = slice(start, min(start + width, len(weight)))
        logits = memory[: len(rows) * (columns.stop - start)].view(len(rows), columns.stop - start)
        torch.mm(rows, weight[columns].t(), out=logits)
        yield columns, logits


# --- a block of columns: what it adds to the softmax, and its gradient -----------------------------------------------
#
# Both heads are loops around these two functions. With z = logits / temperature, p = softmax(z) over the whole
# vocabulary and H its entropy,
#
#     d log p(target) / dz = onehot(target) - p          dH / dz = -p (log p + H)
#
# Sums are online (Milakov and Gimelshein 2018): relative to the largest z so far, and rescaled when it grows. On GPUs
# the two functions are Triton kernels (kernels.py), for the types that are trained in.


def add_columns(
    softmax: RunningSoftmax, logits: Tensor, targets: Tensor, temperature: float, *, overwrite: bool = False
) -> None:
    """Adds a block of columns. logits: [N, C]. targets: [N], of which 0 to C - 1 are columns of this block. overwrite:
    the logits are needed no more, and their memory may be used."""
    if _has_kernels(logits):
        from nemo_edo.parallel import kernels

        return kernels.add_columns(softmax, logits, targets, temperature)
    z = logits.to(compute_dtype(logits), copy=not overwrite)
    if temperature != 1:
        z.div_(temperature)
    here, column = _locate(targets, z.shape[1])
    softmax.target.copy_(torch.where(here, z.gather(1, column).squeeze(1), softmax.target))
    softmax.rescale_(torch.maximum(softmax.maximum, z.amax(dim=1)))
    z.sub_(softmax.maximum.unsqueeze(1))
    z.clamp_(min=FLOOR)
    exp_z = z.exp()
    softmax.sum_exp += exp_z.sum(dim=1)
    softmax.sum_exp_z += exp_z.mul_(z).sum(dim=1)


def write_gradient(out: Tensor, logits: Tensor, targets: Tensor, temperature: float, results: ResultGradients) -> None:
    """Writes the logits' gradient into ``out`` [N, C], which may be the logits. Arguments as in ``add_columns``."""
    if _has_kernels(logits):
        from nemo_edo.parallel import kernels

        return kernels.write_gradient(out, logits, targets, temperature, results)
    z = out if out.dtype == compute_dtype(logits) else torch.empty_like(out, dtype=compute_dtype(logits))
    z.copy_(logits)
    if temperature != 1:
        z.div_(temperature)
    z.sub_(results.log_sum_exp.unsqueeze(1))
    if results.of_entropy is None:
        z.exp_().mul_(-results.of_log_prob.unsqueeze(1))
    else:
        p = z.clamp_(min=FLOOR).exp()
        constant = torch.addcmul(results.of_log_prob, results.of_entropy, results.entropy)
        z.mul_(results.of_entropy.unsqueeze(1)).add_(constant.unsqueeze(1)).mul_(p).neg_()
    here, column = _locate(targets, z.shape[1])
    z.scatter_add_(1, column, torch.where(here, results.of_log_prob, 0.0).unsqueeze(1))
    if temperature != 1:
        z.div_(temperature)
    if z is not out:
        out.copy_(z)


def _locate(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a target is one of the columns [N], and which [N, 1] (any, where it is none)."""
    return (targets >= 0) & (targets < columns), targets.clamp(0, columns - 1).unsqueeze(1)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
