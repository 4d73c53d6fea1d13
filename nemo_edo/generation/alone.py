"""An engine for the one process that draws beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Protocol

from nemo_edo.types import GenerationRequest, Rollout, SamplingParams


class Draws(Protocol):
    """Of a ``ServerEngine``: what draws without the other ranks."""

    policy_version: int

    def draw(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, stop: Event | None = None
    ) -> list[Rollout]:
        """One rollout for each request, in order; raises RunStopped soon after ``stop`` is set."""


class DrawsAlone:
    """A GenerationEngine in which no other rank has a part, and which ends when it is told to."""

    def __init__(self, engine: Draws, stop: Event) -> None:
        self.policy_version = engine.policy_version
        self._engine = engine
        self._stop = stop

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        return self._engine.draw(requests, sampling, stop=self._stop)
