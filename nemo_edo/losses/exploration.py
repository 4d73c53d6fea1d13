"""The exploration term of EDO: away from the policy that produced the samples.

E_{y~pi_old}[log pi_theta - log pi_old], estimated on samples of pi_old, is -KL(pi_old || pi_theta). Multiplied by
alpha * beta it is *added* to a minimised loss (the paper's reward-biasing objective, J* up to a constant, negated).

The samples stay fixed: no gradient flows through sampling, and no score function or ratio multiplies the term. Its
expected gradient is zero while pi_theta equals pi_old (with a constant denominator), so it acts over the later,
off-policy steps of an iteration. Without the floor it is unbounded below. The floor and the noise control are ours, not
the paper's.
"""

import torch
from torch import Tensor

from nemo_edo.config import DPOLossConfig, GRPOLossConfig
from nemo_edo.losses.checks import check_coefficient, checked, constant, require_finite
from nemo_edo.losses.term import LossTerm, Reduction, per_token, read_tokens, token_mean


def step_weight(config: GRPOLossConfig | DPOLossConfig, exploration_weight: float | None) -> float:
    """The term's weight in an optimizer step: the given one, or the configured one. Raises ValueError for a weight that
    is negative or not finite: the term's sign is in the loss."""
    if exploration_weight is None:
        return config.exploration_weight
    check_coefficient("exploration_weight", exploration_weight)
    return exploration_weight


@checked
def exploration_per_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    log_ratio_floor: float | None = None,
    weights: Tensor | None = None,
    on_empty: str = "error",
) -> Tensor:
    """log pi_theta - log pi_old of sampled tokens, floored and weighted but not reduced; [B, T], zeros at padding. For
    trainers that reduce a matrix of token losses themselves, with their own denominators.

    logprobs: [B, T] natural log-probabilities under pi_theta; the gradient flows through these alone.
    old_logprobs: [B, T] under pi_old, the frozen policy that produced the samples.
    mask: [B, T], 1 where a response token counts.
    log_ratio_floor: nats, below 0. A token whose log-ratio is below it has the floor as value and gradient zero.
    weights: [B] or [B, T] constant factors on tokens: truncated ratios pi_old/mu for samples of another policy mu.
    on_empty: "error" or "zero", for a mask without a 1 (``term.read_tokens``).
    Raises ValueError as ``term.read_tokens`` does, and for a floor of 0 or above.
    """
    _, log_ratio, weights = _read(logprobs, old_logprobs, mask, weights, on_empty)
    return weighted_log_ratio(log_ratio, weights, log_ratio_floor)


@checked
def exploration_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    reduction: str,
    log_ratio_floor: float | None = None,
    weights: Tensor | None = None,
    norm_length: float | None = None,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> LossTerm:
    """``exploration_per_token``, reduced as ``reduce_tokens`` says, with the arguments and errors of these two. Weights
    do not enter the count."""
    valid, log_ratio, weights = _read(logprobs, old_logprobs, mask, weights, on_empty)
    return Reduction(valid, reduction, norm_length, rows)(weighted_log_ratio(log_ratio, weights, log_ratio_floor))


@checked
def exploration_noise_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    reduction: str,
    log_ratio_floor: float | None = None,
    weights: Tensor | None = None,
    norm_length: float | None = None,
    rows: str = "non-empty",
    on_empty: str = "error",
) -> LossTerm:
    """The control for ``exploration_term``: each token's log-ratio times its detached ratio pi_theta / pi_old.

    E_{y_t~pi_old}[ratio * grad log pi_theta] = sum over y_t of grad pi_theta = 0 after every prefix, for every
    pi_theta. Unfloored and with a denominator that no sample changes ("seq-sum", "seq-mean-token-sum-norm"), the
    expected gradient is thus zero off-policy too: what a run with it shows is noise of the term's size, no drift. The
    floor removes the gradient at the same tokens as in the term. Raises ValueError, too, for a ratio that overflows.
    """
    valid, log_ratio, weights = _read(logprobs, old_logprobs, mask, weights, on_empty)
    noise = noise_weights(log_ratio, weights)
    return Reduction(valid, reduction, norm_length, rows)(weighted_log_ratio(log_ratio, noise, log_ratio_floor))


def weighted_log_ratio(log_ratio: Tensor, weights: Tensor | None, log_ratio_floor: float | None) -> Tensor:
    """The term's values [B, T]: the log-ratio of each token, floored, times its weight."""
    if log_ratio_floor is not None:
        # No clamp: its gradient at the bound itself depends on torch's version.
        log_ratio = torch.where(below_floor(log_ratio, log_ratio_floor), log_ratio_floor, log_ratio)
    return weighted(log_ratio, weights)


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """weights * values; None: all weights are 1."""
    return values if weights is None else weights * values


def noise_weights(log_ratio: Tensor, weights: Tensor | None) -> Tensor:
    """The weights of ``exploration_noise_term``, with the ratio of each token as a constant."""
    ratio = log_ratio.detach().exp()
    require_finite("the ratio exp(logprobs - old_logprobs)", ratio)
    return weighted(ratio, weights)


def below_floor(log_ratio: Tensor, log_ratio_floor: float | None) -> Tensor:
    """Which tokens the floor switches off; none without one. Raises ValueError for a floor of 0 or above."""
    if log_ratio_floor is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    if not log_ratio_floor < 0:
        raise ValueError(f"log_ratio_floor is {log_ratio_floor}, expected None or a number below 0 (nats)")
    return log_ratio < log_ratio_floor


def first_tokens(valid: Tensor, number: int) -> Tensor:
    """[B, T] bool: the first ``number`` (at least 1) valid tokens of each response; as weights of the term, whose count
    stays that of all valid tokens."""
    if number < 1:
        raise ValueError(f"number is {number}, expected at least 1")
    return valid & (valid.cumsum(dim=1) <= number)


@checked
def floor_share(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, log_ratio_floor: float | None) -> LossTerm:
    """The share of the term that the floor has switched off: valid tokens with a log-ratio below it; count = valid
    tokens. 0 without a floor or a valid token; no gradient."""
    valid, log_ratio, _ = _read(logprobs.detach(), old_logprobs, mask, None, "zero")
    return token_mean(below_floor(log_ratio, log_ratio_floor).to(log_ratio.dtype), valid)


def _read(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, weights: Tensor | None, on_empty: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Which tokens count, their log-ratios, and their weights as constants."""
    weights = weights if weights is None else per_token(weights.detach(), mask)
    valid, (logprobs, old_logprobs, weights) = read_tokens(
        mask, on_empty, logprobs=logprobs, old_logprobs=constant("old_logprobs", old_logprobs), weights=weights
    )
    return valid, logprobs - old_logprobs, weights
