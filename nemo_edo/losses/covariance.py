"""Clip-Cov and KL-Cov: which tokens drive the loss of entropy.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models": entropy falls at the
rate of the covariance between log-probability and advantage, and few tokens carry it. These functions select those
tokens; ``grpo_loss`` takes the selection.

Run them over the whole global batch, before it is split: means and ranks inside a micro-batch would make the gradient
depend on the split. The log-probabilities may be those of pi_old, which are at hand then, or of pi_theta.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_edo.losses.checks import checked, one_check
from nemo_edo.losses.term import per_token, read_tokens


@checked
def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean log pi)(A - mean A) at each token; [B, T], zero at padding, without gradient (eq. 10).

    logprobs: [B, T] natural log-probabilities of the sampled tokens. advantages: [B] or [B, T].
    mask: [B, T], 1 where a response token counts. Both means are over all tokens with mask 1, in double precision; the
    result has the type of logprobs. Its unit is nats times the advantages' unit.
    Raises ValueError for shapes that differ and for NaN or infinity at a valid token.
    """
    valid_BT, (logprobs_BT, advantages_BT) = read_tokens(
        mask, logprobs=logprobs.detach(), advantages=per_token(advantages.detach(), mask)
    )
    count = valid_BT.sum()

    def deviation(values_BT: Tensor) -> Tensor:
        values_BT = values_BT.double()
        return values_BT - values_BT.sum() / count

    covariances_BT = deviation(logprobs_BT) * deviation(advantages_BT)
    return torch.where(valid_BT, covariances_BT, 0.0).to(logprobs.dtype)


def clip_cov_selection(
    covariances: Tensor, mask: Tensor, *, share: float, low: float, high: float, seed: int
) -> Tensor:
    """The tokens that Clip-Cov removes from the policy gradient, sampled at random; [B, T] bool (eq. 11).

    covariances: [B, T] from ``token_covariances``. Eligible are valid tokens with low <= covariance <= high: absolute
    bounds, in the covariances' own unit (the authors use 1 and 5, far above the mean covariance).
    share: int(share * valid tokens) are sampled without replacement, but at least 1 if share is above 0, as in the
    authors' code; all eligible tokens where there are fewer. The seed fixes the selection.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token, a share outside [0, 1] and low > high.
    """
    if not low <= high:
        raise ValueError(f"low is {low}, expected a number of at most high = {high}")
    with one_check():
        valid_BT, (covariances_BT,) = read_tokens(mask, "zero", covariances=covariances)
    eligible = (valid_BT & (covariances_BT >= low) & (covariances_BT <= high)).flatten().nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)  # a CPU generator: the same selection on every device
    order = torch.randperm(len(eligible), generator=generator).to(eligible.device)
    return _at(eligible[order[: _selected_count(share, valid_BT)]], mask)


def kl_cov_selection(covariances: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The tokens that KL-Cov keeps close to pi_old, those with the highest covariances; [B, T] bool (eq. 13).

    covariances: [B, T] from ``token_covariances``. share: int(share * valid tokens) are selected, but at least 1 if
    share is above 0, as in the authors' code. Among equal covariances, the first in row-major order wins.
    Raises ValueError for shapes that differ, NaN or infinity at a valid token and a share outside [0, 1].
    """
    with one_check():
        valid_BT, (covariances_BT,) = read_tokens(mask, "zero", covariances=covariances)
    positions = valid_BT.flatten().nonzero().flatten()
    order = covariances_BT[valid_BT].argsort(descending=True, stable=True)
    return _at(positions[order[: _selected_count(share, valid_BT)]], mask)


def _selected_count(share: float, valid_BT: Tensor) -> int:
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, expected a number in [0, 1]")
    return max(int(share * int(valid_BT.sum())), 1 if share > 0 else 0)


def _at(positions: Tensor, mask: Tensor) -> Tensor:
    """[B, T] bool, True at the given row-major positions."""
    selected = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    selected[positions] = True
    return selected.view(mask.shape)
