"""Settings of every adapter (coefficient and floor), and the check that the trainer's schedule lets the term act."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_edo.losses import exploration_per_token, floor_share, one_check
from nemo_edo.losses.checks import check_coefficient


@dataclass(frozen=True)
class ExplorationSettings:
    """Raises ValueError for a coefficient that is negative or not finite, and for a floor of 0 or above."""

    coefficient: float
    """Multiplies the term, which is added to the minimised loss; with 0 the loss stays the trainer's to the last bit.
    It is alpha * beta of the paper."""
    log_ratio_floor: float | None = None
    """Nats, below 0: tokens whose log-ratio is below it have no gradient of the term. None: the term is unbounded."""

    def __post_init__(self) -> None:
        check_coefficient("exploration_coefficient", self.coefficient)
        if self.log_ratio_floor is not None and not self.log_ratio_floor < 0:
            raise ValueError(f"log_ratio_floor is {self.log_ratio_floor}, expected None or a number below 0 (nats)")

    def term(
        self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The term's values without the coefficient, [B, T] (``exploration_per_token``), zeros for a mask without a 1;
        and for metrics, without gradient, [3]: their sum, the tokens below the floor, and the tokens."""
        floor = self.log_ratio_floor
        with one_check():
            values_BT = exploration_per_token(
                logprobs, old_logprobs, mask, log_ratio_floor=floor, weights=weights, on_empty="zero"
            )
            below = floor_share(logprobs, old_logprobs, mask, floor)
        sums = (values_BT.detach().sum(), below.sum, below.count)
        return values_BT, torch.stack([torch.as_tensor(x).to(values_BT.dtype) for x in sums])

    def require_several_steps(self, steps: float, change: str) -> None:
        """Raises ValueError, which says what to change, for one optimizer step (or fewer) for each collection.

        While the policy equals its sampler the term's expected gradient is zero: such a schedule would add noise.
        """
        if self.coefficient != 0 and steps <= 1:
            raise ValueError(
                "one optimizer step for each collection of samples: the policy still equals its sampler there, and "
                f"the exploration term would be zero-mean noise. {change}, or set the exploration coefficient to 0"
            )

    def warn_of_cut_sampling(self, cut: Mapping[str, object]) -> None:
        """Warns where responses are sampled from a cut distribution (top-p, top-k, min-p) and the term acts.

        cut: the settings that cut it. The log-probabilities are the whole distribution's, so the term's expected
        gradient is not zero where the policy equals its sampler.
        """
        if self.coefficient != 0 and cut:
            settings = ", ".join(f"{name}={value}" for name, value in cut.items())
            warnings.warn(
                f"{settings}: the responses are of a cut distribution and their log-probabilities of the whole one, so "
                "the exploration term pushes from what was kept towards what was cut off, on average even where the "
                "policy equals its sampler; sample from the whole distribution",
                stacklevel=3,
            )
