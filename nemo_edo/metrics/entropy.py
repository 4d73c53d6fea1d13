"""Entropy of the next-token distribution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_edo.metrics.intervals import whole_number


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0, chunk: int = 4096) -> Tensor:
    """Exact entropy in nats of p = softmax(logits / temperature) over the last dimension: [..., V] -> [...].

    H = -sum_v p_v log p_v, from 0 to log V. Computed and returned in fp32 for half-precision logits, otherwise in
    the logits' type; differentiable once. A logit of -inf is an outcome of probability 0.
    chunk: vocabulary entries taken at a time. Neither pass makes a copy of the logits in fp32, only of one chunk; the
    backward pass makes the gradient, in the logits' type.
    Raises ValueError for no vocabulary, logits that are not floating, NaN, +inf or -inf alone at a position, and a
    temperature or chunk that is not positive.
    """
    chunk = whole_number("chunk", chunk, least=1)
    single = torch.finfo(torch.float32)
    if not single.tiny <= temperature <= single.max:
        raise ValueError(f"temperature is {temperature}, expected a number above 0, within the range of fp32")
    if logits.ndim == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating [..., V], V > 0")
    return _Entropy.apply(logits, temperature, chunk)


class _Entropy(torch.autograd.Function):
    """With z = (logits - max) / temperature and s = sum of exp z: log p = z - log s, H = log s - (sum of z exp z) / s.

    dH / dlogits = -p (log p + H) / temperature
    """

    @staticmethod
    def forward(ctx, logits, temperature, chunk):
        highest = logits.amax(dim=-1, keepdim=True)
        if not torch.isfinite(highest).all():
            wrong = highest[~torch.isfinite(highest)]
            found = "NaN" if wrong.isnan().any() else "+inf" if wrong.isposinf().any() else "nothing but -inf"
            raise ValueError(
                f"logits hold {found}; {wrong.numel()} of {highest.numel()} positions have no distribution"
            )
        # The two sums are of one number for each position: double costs little, and keeps entropies near 0 exact.
        sum_exp = torch.zeros_like(highest, dtype=torch.float64)
        sum_exp_z = torch.zeros_like(sum_exp)
        for _, z in _scaled_chunks(logits, highest, temperature, chunk):
            exp_z = z.exp()
            sum_exp += exp_z.sum(dim=-1, keepdim=True, dtype=torch.float64)
            sum_exp_z += exp_z.mul_(z).sum(dim=-1, keepdim=True, dtype=torch.float64)
        log_sum = sum_exp.log()
        entropies = (log_sum - sum_exp_z / sum_exp).to(torch.promote_types(logits.dtype, torch.float32))
        ctx.save_for_backward(logits, highest, log_sum.to(entropies.dtype), entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        return entropies.squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_entropies):
        logits, highest, log_sum, entropies = ctx.saved_tensors
        factor = -grad_entropies.unsqueeze(-1) / ctx.temperature
        grad = torch.empty_like(logits)
        for columns, z in _scaled_chunks(logits, highest, ctx.temperature, ctx.chunk):
            log_p = z.sub_(log_sum)
            grad[..., columns] = log_p.exp().mul_(log_p.add_(entropies)).mul_(factor)
        return grad, None, None


def _scaled_chunks(logits: Tensor, highest: Tensor, temperature: float, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """The columns and z of one chunk after the other; z is finite, so that exp(z) * z is 0 for a logit of -inf."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    for start in range(0, logits.shape[-1], chunk):
        columns = slice(start, start + chunk)
        z = logits[..., columns].to(dtype, copy=True).sub_(highest).div_(temperature)
        yield columns, z.clamp_(min=torch.finfo(dtype).min)
