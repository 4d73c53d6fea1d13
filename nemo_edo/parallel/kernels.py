"""logprobs.py's two functions of a block as Triton kernels: one pass over the logits each, with no copy in fp32.
Imported on GPUs only. With TRITON_INTERPRET=1 in the environment before the import, Triton runs them on a CPU."""

import triton
import triton.language as tl
from torch import Tensor

from nemo_edo.parallel.softmax_state import FLOOR, ResultGradients, RunningSoftmax

TILE = 4096  # columns that a program has in its registers at a time, with 8 warps
_FLOOR = tl.constexpr(FLOOR)


def add_columns(softmax: RunningSoftmax, logits: Tensor, targets: Tensor, temperature: float) -> None:
    """``logprobs.add_columns``, except that it leaves the logits as they are."""
    rows, columns = logits.shape
    tile = min(TILE, triton.next_power_of_2(columns))
    _add_columns[(rows,)](
        logits, targets, softmax.maximum, softmax.sum_exp, softmax.sum_exp_z, softmax.target, logits.stride(0), columns,
        temperature, TILE=tile, num_warps=8,
    )  # fmt: skip


def write_gradient(out: Tensor, logits: Tensor, targets: Tensor, temperature: float, results: ResultGradients) -> None:
    """``logprobs.write_gradient``."""
    rows, columns = logits.shape
    with_entropy = results.of_entropy is not None
    of_entropy = results.of_entropy if with_entropy else results.of_log_prob  # which is not read then
    tile = min(TILE, triton.next_power_of_2(columns))
    _write_gradient[(rows, triton.cdiv(columns, tile))](
        out, logits, targets, results.log_sum_exp, results.entropy, results.of_log_prob, of_entropy, out.stride(0),
        logits.stride(0), columns, temperature, WITH_ENTROPY=with_entropy, TILE=tile, num_warps=8,
    )  # fmt: skip


@triton.jit
def _add_columns(
    logits, targets, maximum, sum_exp, sum_exp_z, target, stride, columns, temperature, TILE: tl.constexpr
):  # fmt: skip
    """One program for each row, which goes over all columns."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top, total = tl.load(maximum + row), tl.load(sum_exp + row)
    total_z = tl.load(sum_exp_z + row)
    for first in range(0, columns, TILE):
        column = first + tl.arange(0, TILE)
        inside = column < columns
        z = tl.load(start + column, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        new_top = _larger(top, tl.reduce(z, 0, _larger))
        shift = _floored(top - new_top)
        scale = tl.exp(shift)
        z = _floored(z - new_top)
        exp_z = tl.where(inside, tl.exp(z), 0.0)
        total_z = (total_z + total * shift) * scale + tl.sum(exp_z * z, 0)
        total = total * scale + tl.sum(exp_z, 0)
        top = new_top
    tl.store(maximum + row, top)
    tl.store(sum_exp + row, total)
    tl.store(sum_exp_z + row, total_z)
    column = tl.load(targets + row)
    if (column >= 0) & (column < columns):
        tl.store(target + row, tl.load(start + column).to(tl.float32) / temperature)


@triton.jit
def _write_gradient(
    out, logits, targets, log_sum_exp, entropy, of_log_prob, of_entropy, out_stride, stride, columns, temperature,
    WITH_ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program for each row and tile."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) / temperature
    log_p = _floored(z - tl.load(log_sum_exp + row))
    of_target = tl.load(of_log_prob + row)
    factor = tl.zeros_like(log_p) + of_target
    if WITH_ENTROPY:
        factor += tl.load(of_entropy + row) * (log_p + tl.load(entropy + row))
    gradient = tl.where(column == tl.load(targets + row), of_target, 0.0) - tl.exp(log_p) * factor
    tl.store(out + row * out_stride + column, gradient / temperature, mask=inside)


@triton.jit
def _larger(a, b):
    """The larger number; NaN where one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _floored(z):
    return _larger(z, _FLOOR)
