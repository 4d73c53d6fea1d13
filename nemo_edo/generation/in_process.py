"""Engines that need no refit: their weights are the trainer's own, or are never trained."""

from nemo_edo.interfaces import GenerationEngine


class InProcessSync:
    """A WeightSync that moves no weights: it only sets the version of the engine's rollouts."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine

    def push(self, version: int) -> None:
        self.engine.policy_version = version

    def release(self) -> None:
        """Does nothing: the weights are the trainer's, and the KV cache is freed after each batch."""


class ServedModel:
    """A model that only servers have: it is evaluated, and has no log-probabilities but those of its responses."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.weight_sync = InProcessSync(engine)
