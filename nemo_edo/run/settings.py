"""The sections of a run's config that its stages read."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_edo.config import (
    CheckpointConfig,
    EarlyStopConfig,
    EvaluationConfig,
    GenerationConfig,
    GuardsConfig,
    LoopConfig,
    ProfileConfig,
    SamplingConfig,
    SFTConfig,
)


@dataclass(frozen=True)
class RunSettings:
    """What the stages of a run are to do; ``build.Builder`` makes what they do it with."""

    trains: bool
    """False: the run only evaluates."""
    arms: dict[str, LoopConfig]
    seeds: dict[str, int]
    """Of each arm's samples in training, and of their order."""
    seed: int
    """Of all evaluations: all arms answer with the same random numbers."""
    sft: SFTConfig
    sampling: SamplingConfig
    generation: GenerationConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    early_stop: EarlyStopConfig
    guards: GuardsConfig
    """Of the supervised training; ``Builder.guards`` completes an arm's."""
    profile: ProfileConfig

    def final_iteration(self, policy: str) -> int:
        """The number under which a policy's final evaluation is kept (``stored_run.final_iteration``)."""
        return self.arms[policy].iterations if policy in self.arms else 0
