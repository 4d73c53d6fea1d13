"""What a step's tokens and the exploration term show: figures to log, none of which changes the training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_edo.losses.exploration import exploration_term, floor_share
from nemo_edo.losses.term import LossTerm, reduce_tokens, valid_tokens, without_padding


def token_spread(logprobs: Tensor, entropies: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How a global batch's response tokens differ: what means of micro-batches cannot say.

    logprobs, old_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta and pi_old.
    entropies: [B, T] exact entropies of pi_theta, nats. mask: [B, T], 1 where a response token counts.

    - "entropy_p10", "entropy_p90": percentiles of the entropies, nats.
    - "ratio_mean", "ratio_std", "ratio_min", "ratio_max", "ratio_p99": of pi_theta / pi_old at each token.

    Percentiles are interpolated linearly between order statistics, and all is computed in float64 from sorted values,
    so that no order of rows changes a bit. The spread is that of the whole population.
    Raises ValueError for shapes that differ, an empty mask, and NaN or infinity at a valid token.
    """
    tensors = without_padding(
        mask, logprobs=logprobs.detach(), entropies=entropies.detach(), old_logprobs=old_logprobs.detach()
    )
    valid = valid_tokens(mask)
    logprobs_N, entropies_N, old_logprobs_N = (tensor[valid].double().numpy(force=True) for tensor in tensors)
    ratios_N = np.sort(np.exp(logprobs_N - old_logprobs_N))
    low, high = np.quantile(entropies_N, (0.1, 0.9))
    spread = {
        "entropy_p10": low,
        "entropy_p90": high,
        "ratio_mean": ratios_N.mean(),
        "ratio_std": ratios_N.std(),
        "ratio_min": ratios_N[0],
        "ratio_max": ratios_N[-1],
        "ratio_p99": np.quantile(ratios_N, 0.99),
    }
    return {name: float(value) for name, value in spread.items()}


def exploration_diagnostics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    beta: float,
    reduction: str = "seq-sum",
    log_ratio_floor: float | None = None,
    norm_length: float | None = None,
) -> dict[str, LossTerm]:
    """The exploration term and what it is to be read beside, on samples of pi_old; no gradients.

    logprobs, old_logprobs, ref_logprobs: [B, T] natural log-probabilities of the sampled tokens under pi_theta, pi_old
        and pi_ref.
    mask: [B, T], 1 where a response token counts.
    beta: strength of the trust region, 0 or above.
    reduction, log_ratio_floor, norm_length: as in ``exploration_term``.

    - "exploration": the term, in nats; count as the reduction says.
    - "j_star": J*(r) = -beta E_{x, y~pi_old}[log pi_theta(y|x) - log pi_ref(y|x)], the paper's reward-biasing
      objective with the reward that pi_theta is optimal for, shifted to mean zero under pi_old. In the reward's units,
      token sums and never floored, whatever the reduction; count = sequences.
    - "floor_share": share of the tokens that the floor holds; count = tokens.
    - "response_length": in tokens; count = sequences. With a mean over each sequence's tokens the term favours length.

    Raises ValueError for shapes that differ, NaN or infinity at a valid token, a beta below 0 or not finite, and
    whatever ``exploration_term`` refuses.
    """
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta is {beta}, expected a finite number of at least 0")
    logprobs, old_logprobs, ref_logprobs = (x.detach() for x in (logprobs, old_logprobs, ref_logprobs))
    (ref_logprobs,) = without_padding(mask, ref_logprobs=ref_logprobs)
    return {
        "exploration": exploration_term(
            logprobs,
            old_logprobs,
            mask,
            reduction=reduction,
            log_ratio_floor=log_ratio_floor,
            norm_length=norm_length,
        ),
        "j_star": exploration_term(logprobs, ref_logprobs, mask, reduction="seq-sum").scaled(-beta),
        "floor_share": floor_share(logprobs, old_logprobs, mask, log_ratio_floor),
        "response_length": reduce_tokens(torch.ones_like(logprobs), mask, "seq-sum"),
    }


@dataclass(frozen=True)
class GradientComparison:
    """The gradients of the task's loss and of the exploration loss, over the same parameters."""

    task_norm: float
    """Euclidean norm of the task loss's gradient."""
    exploration_norm: float
    """Euclidean norm of the exploration loss's gradient, with whatever weight that loss was given."""
    share: float
    """exploration_norm / task_norm: infinity if only the task's gradient is zero, 0 if both are."""
    cosine: float
    """Of the angle between the two; NaN if either is zero and so has no direction."""

    @classmethod
    def from_moments(
        cls, task_square: float | Tensor, exploration_square: float | Tensor, dot: float | Tensor
    ) -> GradientComparison:
        """From the two sums of squares and the sum of products over all parameters.

        The three add up over disjoint sets of parameters: ranks that hold parts of a model reduce them first.
        Raises ValueError for moments that are not finite, a negative square, and a product that is larger than the
        squares allow (|dot| <= task_norm * exploration_norm), which sums over different parameters give.
        """
        moments = {"task_square": task_square, "exploration_square": exploration_square, "dot": dot}
        moments = {name: float(value) for name, value in moments.items()}
        for name, value in moments.items():
            if not math.isfinite(value) or (value < 0 and name != "dot"):
                raise ValueError(f"{name} is {value}, expected a finite number{'' if name == 'dot' else ' from 0 on'}")
        task_norm, exploration_norm = math.sqrt(moments["task_square"]), math.sqrt(moments["exploration_square"])
        bound = task_norm * exploration_norm
        if abs(moments["dot"]) > bound * 1.001:  # leaves room for moments that were added up in fp32
            raise ValueError(f"dot is {moments['dot']}, beyond the product of the norms, {bound}")
        if task_norm > 0:
            share = exploration_norm / task_norm
        else:
            share = math.inf if exploration_norm > 0 else 0.0
        cosine = max(-1.0, min(1.0, moments["dot"] / bound)) if bound > 0 else math.nan
        return cls(task_norm, exploration_norm, share, cosine)


def gradient_comparison(
    task_loss: Tensor, exploration_loss: Tensor, parameters: Iterable[Tensor]
) -> GradientComparison:
    """Compares the gradients of two scalar losses; two backward passes, so for every now and then.

    task_loss, exploration_loss: scalars, divided and weighted as the training step does it. Both graphs are retained,
        so that the step can still run backward.
    parameters: whatever the gradients are to be taken for; frozen ones are left out. No ``.grad`` is touched. One that
        a loss does not reach, or every one if a loss has no graph, has gradient zero.
    Norms and products are added up in float64. Layers that write into a gradient buffer themselves during backward
    (fused gradient accumulation) are out of ``torch.autograd.grad``'s reach.
    Raises ValueError for a loss that is no scalar, no trainable parameters, and gradients that are not finite.
    """
    if isinstance(parameters, Tensor):  # its rows would pass for parameters that no loss reaches
        raise ValueError(f"parameters is one tensor of shape {tuple(parameters.shape)}, expected an iterable of them")
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ValueError("parameters has no tensor that requires a gradient")
    task_gradients = _gradients("task_loss", task_loss, trainable)
    exploration_gradients = _gradients("exploration_loss", exploration_loss, trainable)
    moments = torch.zeros(3, dtype=torch.float64)
    for task, exploration in zip(task_gradients, exploration_gradients, strict=True):
        task, exploration = task.flatten().double(), exploration.flatten().double()
        moments += torch.stack([task @ task, exploration @ exploration, task @ exploration]).cpu()
    return GradientComparison.from_moments(*moments)


def _gradients(name: str, loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """The gradient of the loss for each parameter, zeros where it does not reach."""
    if loss.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(loss.shape)}, expected a scalar")
    if not loss.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    if not all(torch.isfinite(gradient).all() for gradient in gradients):
        raise ValueError(f"{name} has a gradient with NaN or infinite values")
    return list(gradients)
