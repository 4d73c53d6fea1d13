from __future__ import annotations

from nemo_edo.interfaces import GenerationEngine


class InProcessSync:
    """A WeightSync where engine and trainer share the weights: only the version that rollouts carry moves on."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine

    def push(self, version: int) -> None:
        self.engine.policy_version = version

    def release(self) -> None:
        """The weights are the trainer's own, and the cache ends with each batch."""
