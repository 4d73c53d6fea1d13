"""What a run does about a batch that breaks the numbers, and about a policy that dies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from nemo_edo.config.checks import one_of, positive, require


@dataclass
class BoundsConfig:
    """Bounds on one measurement, and what happens once it has reached one of them."""

    floor: Optional[float] = None
    """The guard fires at this value and below; null: no floor."""
    ceiling: Optional[float] = None
    """The guard fires at this value and above; null: no ceiling."""
    in_a_row: int = 1
    """Measurements at or beyond a bound, one after another, before the guard fires."""
    action: str = "warn"
    """warn: say so and go on; stop: save a checkpoint and end the run."""

    def check(self, section: str) -> None:
        """Raises ValueError for settings that do not fit; ``section`` is what a user writes before their names."""
        one_of(f"{section}.action", self.action, ("warn", "stop"))
        positive(self, section, "in_a_row")
        fits = self.floor is None or self.ceiling is None or self.floor < self.ceiling
        require(fits, f"{section}.floor", self.floor, f"null or a number below {section}.ceiling = {self.ceiling}")


@dataclass
class GuardsConfig:
    """Guards of the numbers (steps that are skipped) and of the policy (bounds on what collections and steps measure).

    They may change between two starts of a run."""

    max_skipped_steps: int = 3
    """Optimizer steps in a row that may be skipped, because the loss or the gradient norm is not finite (or is a spike,
    with ``on_grad_norm_spike`` skip); the last of them stops the run, with its batch kept for ``nemo-edo replay``."""
    grad_norm_spike: Optional[float] = 20.0
    """A gradient norm is a spike above so many times the median of the last 50 steps' (once there are 20). null: none
    is."""
    on_grad_norm_spike: str = "warn"
    """warn: the step is taken; skip: it is not; stop: it is not, and the run ends with the batch kept for replay."""
    kl: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=10.0))
    """Nats for each token, to the reference policy: of a collection, and of a step where its loss has a KL."""
    entropy: BoundsConfig = field(default_factory=lambda: BoundsConfig(floor=0.01, ceiling=6.0))
    """Nats for each token: of a collection, and of a step."""
    truncated: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=0.9))
    """Share of a collection's responses that ran into ``sampling.max_new_tokens``."""
    reward: BoundsConfig = field(default_factory=lambda: BoundsConfig(floor=0.0, ceiling=1.0, in_a_row=3))
    """Mean of a collection's rewards: at 0 or 1 all are equal, and no response is better than another."""
    sampler_gap: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=0.1, action="stop"))
    """Mean over a collection's tokens of |log pi_old - log pi_gen|, in nats: how far the engine's numbers are from the
    trainer's."""
    stale_gap: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=1.0, action="stop"))
    """The same where some responses are of an earlier policy: then the gap holds its move as well."""

    def __post_init__(self) -> None:
        positive(self, "guards", "max_skipped_steps")
        one_of("guards.on_grad_norm_spike", self.on_grad_norm_spike, ("warn", "skip", "stop"))
        factor = self.grad_norm_spike
        require(factor is None or factor > 1, "guards.grad_norm_spike", factor, "null or a number above 1")
        for name in ("kl", "entropy", "truncated", "reward", "sampler_gap", "stale_gap"):
            getattr(self, name).check(f"guards.{name}")
