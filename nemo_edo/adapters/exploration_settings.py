"""Settings of every adapter (coefficient and floor), and the check that the trainer's schedule lets the term act."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from nemo_edo.losses import exploration_per_token, floor_share, one_check
from nemo_edo.losses.checks import check_coefficient

TESTED = {
    "trl": ("1.5", "1.16"),
    "verl": ("0.9", "0.9"),
    "nemo-rl": ("0.6", "0.7"),
    "slime": ("0.3", "0.3"),
    "prime-rl": ("0.8", "0.8"),
    "rllm": ("0.3", "0.3"),
    "skyrl": ("0.3", "0.3"),
}  # the oldest and the newest minor version of each package that its adapter was tested with


@cache
def warn_of_untested(package: str) -> None:
    """Warns, once, where the installed version of a package is outside the tested range; a package that is not
    installed, but on the path, has no version."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        return
    oldest, newest = TESTED[package]
    numbers = [tuple(map(int, re.findall(r"\d+", one)[:2])) for one in (oldest, installed, newest)]
    if sorted(numbers) != numbers:
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        warnings.warn(f"nemo_edo's adapter was tested with {package} {tested}; this is {installed}", stacklevel=3)


WHOLE = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
"""The values that leave the distribution as it is."""
SETTINGS = ("exploration_coefficient", "log_ratio_floor")


@cache  # slime asks in every micro-batch, with more than a thousand keys
def refuse_near_misses(keys: frozenset[object], prefix: str) -> None:
    """Raises ValueError for a key that looks like a setting's: some trainers keep keys that they do not know."""
    for key in set(map(str, keys)) - set(SETTINGS):
        if near := get_close_matches(key, SETTINGS, 1, 0.8):
            raise ValueError(f"{prefix}{key} is not a setting; did you mean {prefix}{near[0]}?")


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
        floor = self.log_ratio_floor
        if floor is not None and (isinstance(floor, str | bool) or not floor < 0):
            raise ValueError(f"log_ratio_floor is {floor!r}, expected None or a number below 0 (nats)")

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
        sums = (values_BT.detach().float().sum(), below.sum, below.count)
        return values_BT, torch.stack([torch.as_tensor(x).to(sums[0]) for x in sums])

    @staticmethod
    def metrics(sums: Tensor) -> dict[str, float]:
        """``exploration`` (mean over tokens, in nats, floored, without the coefficient) and ``floor_share`` of the sums
        that ``term`` gives. Waits for the device once."""
        total, below, tokens = sums.tolist()
        return {"exploration": total / max(tokens, 1), "floor_share": below / max(tokens, 1)}

    def require_several_steps(self, steps: float, change: str) -> None:
        """Raises ValueError, which says what to change, for one optimizer step (or fewer) for each collection: while
        the policy equals its sampler the term's expected gradient is zero, and such a schedule would add noise."""
        if self.coefficient != 0 and steps <= 1:
            raise ValueError(
                "one optimizer step for each collection of samples: the policy still equals its sampler there, and "
                f"the exploration term would be zero-mean noise. {change}, or set the exploration coefficient to 0"
            )

    def warn_of_cut_sampling(self, sampling: Mapping[str, object], prefix: str = "") -> None:
        """Warns where responses are sampled from a cut distribution and the term acts: the log-probabilities are the
        whole distribution's, so the term's expected gradient is not zero where the policy equals its sampler.

        sampling: the trainer's settings; those of ``WHOLE`` are read. prefix: of their names in the message."""
        cut = {name: sampling[name] for name, whole in WHOLE.items() if sampling.get(name) not in whole}
        if self.coefficient != 0 and cut:
            settings = ", ".join(f"{prefix}{name}={value}" for name, value in cut.items())
            warnings.warn(
                f"{settings}: the responses are of a cut distribution and their log-probabilities of the whole one, so "
                "the exploration term pushes from what was kept towards what was cut off, on average even where the "
                "policy equals its sampler; sample from the whole distribution",
                stacklevel=3,
            )
