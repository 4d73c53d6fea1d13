"""The exploration term of EDO: away from the policy that produced the samples.

E_{y~pi_old}[log pi_theta - log pi_old], estimated on samples of pi_old, is -KL(pi_old || pi_theta). Multiplied by
alpha * beta it is *added* to a minimised loss (the paper's reward-biasing objective, J* up to a constant, negated).

The samples stay fixed: no gradient flows through sampling, and no score function or ratio multiplies the term. Its
expected gradient is zero while pi_theta equals pi_old (with a constant denominator), so it acts over the later,
off-policy steps of an iteration. Without the floor it is unbounded below. The floor is ours, not the paper's, and so
are the exact form over the vocabulary and the noise control.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_edo.losses.term import LossTerm, per_token, reduce_tokens, require_finite, valid_tokens, without_padding

# Logits that the exact form works on at a time: 64 MiB in fp32 for each of its few temporaries.
_CHUNK_ELEMENTS = 2**24


def exploration_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    reduction: str,
    log_ratio_floor: float | None = None,
    weights: Tensor | None = None,
    norm_length: float | None = None,
) -> LossTerm:
    """log pi_theta - log pi_old of sampled tokens, reduced as ``reduce_tokens`` says (sums and counts are there).

    logprobs: [B, T] natural log-probabilities under pi_theta; the gradient flows through these alone.
    old_logprobs: [B, T] under pi_old, the frozen policy that produced the samples.
    mask: [B, T], 1 where a response token counts.
    log_ratio_floor: nats, below 0. A token whose log-ratio is below it has the floor as value and gradient zero.
    weights: [B] or [B, T] factors on tokens, used as constants: truncated ratios pi_old/mu for samples of another
        policy mu. They do not enter the count.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, and a floor of 0 or above.
    """
    logprobs, old_logprobs = without_padding(mask, logprobs=logprobs, old_logprobs=old_logprobs.detach())
    log_ratio = logprobs - old_logprobs
    if log_ratio_floor is not None:
        _check_floor(log_ratio_floor)
        log_ratio = log_ratio.clamp(min=log_ratio_floor)  # clamp's gradient is exactly zero below its minimum
    if weights is not None:
        log_ratio = _token_weights(weights, mask) * log_ratio
    return reduce_tokens(log_ratio, mask, reduction, norm_length)


def exploration_noise_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    reduction: str,
    log_ratio_floor: float | None = None,
    weights: Tensor | None = None,
    norm_length: float | None = None,
) -> LossTerm:
    """The control for ``exploration_term``: each token's log-ratio times its detached ratio pi_theta / pi_old.

    E_{y_t~pi_old}[ratio * grad log pi_theta] = sum over y_t of grad pi_theta = 0 after every prefix, for every
    pi_theta. Unfloored and with a denominator that no sample changes ("seq-sum", "seq-mean-token-sum-norm"), the
    expected gradient is thus zero off-policy too: what a run with it shows is noise of the term's size, no drift.
    The floor takes the gradient from the very tokens that it takes it from in the term.

    Arguments, sum, count and errors are those of ``exploration_term``; besides, ValueError for a ratio that overflows.
    """
    logprobs, old_logprobs = without_padding(mask, logprobs=logprobs, old_logprobs=old_logprobs.detach())
    ratio = (logprobs.detach() - old_logprobs).exp()
    require_finite("the ratio exp(logprobs - old_logprobs)", ratio)
    return exploration_term(
        logprobs,
        old_logprobs,
        mask,
        reduction=reduction,
        log_ratio_floor=log_ratio_floor,
        weights=ratio if weights is None else _token_weights(weights, mask) * ratio,
        norm_length=norm_length,
    )


def exact_exploration_term(
    logits: Tensor,
    old_logits: Tensor,
    mask: Tensor,
    *,
    reduction: str,
    log_ratio_floor: float | None = None,
    weights: Tensor | None = None,
    temperature: float = 1.0,
    norm_length: float | None = None,
) -> LossTerm:
    """-KL(pi_old || pi_theta) of the next token at each sampled position, reduced as ``reduce_tokens`` says.

    sum_v pi_old(v) * (log pi_theta(v) - log pi_old(v)) over the vocabulary is the expectation of ``exploration_term``'s
    log-ratio over y_t ~ pi_old, given the sampled y_<t: the same term without the noise of the last draw.

    logits, old_logits: [B, T, V] of pi_theta and pi_old; pi = softmax(logits / temperature). The gradient flows
        through the first alone. -infinity is probability 0: an entry that pi_old gives 0 contributes nothing.
    mask, weights: as in ``exploration_term``. Logits at padding are never read.
    log_ratio_floor: nats, below 0, under each entry's log-ratio; an entry below it has the floor as value and gradient
        zero through its own log-ratio, so that the sampled term's expectation stays equal to this one.
    temperature: that of the sampling.

    Computed in fp32 (fp64 for fp64 logits), a chunk of tokens at a time; nothing but the inputs is kept for backward.
    Raises ValueError for shapes that differ; NaN, +infinity or nothing but -infinity at a valid position; probability
    0 under pi_theta where pi_old has more, unless there is a floor; a floor of 0 or above; a temperature not above 0.
    """
    valid_BT = valid_tokens(mask)
    for name, tensor in (("logits", logits), ("old_logits", old_logits)):
        if tensor.ndim != 3 or tensor.shape[:2] != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected [B, T, V] with mask {tuple(mask.shape)}"
            )
    if logits.shape != old_logits.shape:
        raise ValueError(f"old_logits has shape {tuple(old_logits.shape)}, but logits has {tuple(logits.shape)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, expected a finite number above 0")
    if log_ratio_floor is not None:
        _check_floor(log_ratio_floor)
    values_BT = _ExpectedLogRatio.apply(logits, old_logits.detach(), valid_BT, log_ratio_floor, temperature)
    if not torch.isfinite(values_BT).all():
        raise ValueError(_why_not_finite(values_BT, logits, old_logits, temperature))
    if weights is not None:
        values_BT = _token_weights(weights, mask) * values_BT
    return reduce_tokens(values_BT, mask, reduction, norm_length)


def floor_share(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, log_ratio_floor: float | None) -> LossTerm:
    """How much of the term the floor has switched off: valid tokens with a log-ratio below it; count = valid tokens.

    Arguments and errors as for ``exploration_term``; without a floor the share is 0. Has no gradient.
    """
    logprobs, old_logprobs = without_padding(mask, logprobs=logprobs.detach(), old_logprobs=old_logprobs.detach())
    if log_ratio_floor is None:
        return reduce_tokens(torch.zeros_like(logprobs), mask, "token-mean")
    _check_floor(log_ratio_floor)
    below = logprobs - old_logprobs < log_ratio_floor
    return reduce_tokens(below.to(logprobs.dtype), mask, "token-mean")


class _ExpectedLogRatio(torch.autograd.Function):
    """[B, T]: the sum over v of pi_old(v) * max(log pi_theta(v) - log pi_old(v), floor) at valid tokens, 0 elsewhere.

    With w = pi_old, but 0 where the floor holds: d sum / d logits = (w - pi_theta * (sum of w)) / temperature.
    Backward computes the probabilities again, so that none of size [B, T, V] lives between the passes.
    """

    @staticmethod
    def forward(ctx, logits, old_logits, valid_BT, floor, temperature):
        ctx.save_for_backward(logits, old_logits, valid_BT)
        ctx.floor, ctx.temperature = floor, temperature
        values_BT = torch.zeros(valid_BT.shape, dtype=_working_dtype(logits, old_logits), device=logits.device)
        for tokens in _token_chunks(valid_BT, logits.shape[-1]):
            _, old_p_NV, log_ratio_NV = _log_ratios(logits[tokens], old_logits[tokens], temperature)
            if floor is not None:
                log_ratio_NV = log_ratio_NV.clamp(min=floor)
            values_BT[tokens] = (old_p_NV * log_ratio_NV).sum(dim=-1)
        return values_BT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_BT):
        logits, old_logits, valid_BT = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for tokens in _token_chunks(valid_BT, logits.shape[-1]):
            p_NV, w_NV, log_ratio_NV = _log_ratios(logits[tokens], old_logits[tokens], ctx.temperature)
            if ctx.floor is not None:
                w_NV = torch.where(log_ratio_NV < ctx.floor, 0.0, w_NV)
            gradient_NV = (w_NV - p_NV * w_NV.sum(dim=-1, keepdim=True)) * (grad_BT[tokens] / ctx.temperature)[:, None]
            grad_logits[tokens] = gradient_NV.to(logits.dtype)
        return grad_logits, None, None, None, None


def _log_ratios(logits_NV: Tensor, old_logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """pi_theta, pi_old and log pi_theta - log pi_old, the last 0 where pi_old is 0."""
    dtype = _working_dtype(logits_NV, old_logits_NV)
    log_p_NV, old_log_p_NV = ((x.to(dtype) / temperature).log_softmax(dim=-1) for x in (logits_NV, old_logits_NV))
    old_p_NV = old_log_p_NV.exp()
    return log_p_NV.exp(), old_p_NV, torch.where(old_p_NV == 0, 0.0, log_p_NV - old_log_p_NV)


def _working_dtype(logits: Tensor, old_logits: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(logits.dtype, old_logits.dtype), torch.float32)


def _token_chunks(valid_BT: Tensor, vocabulary: int) -> list[tuple[Tensor, ...]]:
    """The valid tokens as indices into a [B, T, ...] tensor, at most ``_CHUNK_ELEMENTS`` logits together."""
    chunks = valid_BT.nonzero().split(max(1, _CHUNK_ELEMENTS // max(1, vocabulary)))
    return [chunk.unbind(dim=1) for chunk in chunks]


def _why_not_finite(values_BT: Tensor, logits: Tensor, old_logits: Tensor, temperature: float) -> str:
    row, token = (~torch.isfinite(values_BT)).nonzero()[0].tolist()
    place = f"at sequence {row}, token {token}, which counts (mask 1)"
    for name, tensor in (("logits", logits), ("old_logits", old_logits)):
        if not (tensor[row, token].to(values_BT.dtype) / temperature).logsumexp(dim=-1).isfinite():
            return f"{name} has NaN, +infinity or nothing but -infinity {place}"
    return (
        f"logits has probability 0 for an entry that old_logits gives more {place}: the term is -infinity there "
        "unless log_ratio_floor bounds it"
    )


def _token_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """[B] or [B, T] weights as constants [B, T], with zeros at padding."""
    return without_padding(mask, weights=per_token(weights.detach(), mask))[0]


def _check_floor(log_ratio_floor: float) -> None:
    if not log_ratio_floor < 0:
        raise ValueError(f"log_ratio_floor is {log_ratio_floor}, expected None or a number below 0 (nats)")
