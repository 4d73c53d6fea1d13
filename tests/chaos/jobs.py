"""The tiny runs that faults happen to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers import completions_server

KEY = {"CHAOS_KEY": completions_server.KEY}
"""The key that ``helpers.completions_server`` asks for."""
_COMMON = (
    "--config-name=quickstart", "~arms", "replicate_baseline=false", "sft.steps=3", "sft.batch_size=8",
    "sampling.samples_per_prompt=2",
    "sampling.max_new_tokens=6", "data.arithmetic.train_problems=6", "data.arithmetic.test_problems=4",
    "data.arithmetic.warmup_problems=24", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
    "generation.part_size=4", "checkpoint.every_steps=2", "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=64", "grpo.iterations=2", "grpo.minibatch_size=4", "grpo.micro_batch_size=4",
    "idpo.iterations=2", "idpo.minibatch_size=3", "idpo.micro_batch_size=8",
    "rewards.function=tests.chaos.reward:score",
)  # fmt: skip
_GRPO = ("+arms={grpo: {alpha: 0.5}}", "evaluation.every=1", "checkpoint.best=accuracy")
_IDPO = ("+arms={idpo: {algorithm: idpo, exploration_coefficient: 0.05}}", "idpo.reference=ema", "idpo.ema_decay=0.5")
_SERVED = (
    "generation=vllm", "generation.servers.api_key_variable=CHAOS_KEY", "generation.servers.health_limit_s=3",
    "generation.servers.restarts=1", "generation.servers.attempts=4", "generation.servers.backoff_limit_s=0.5",
    "generation.refit.limit_s=30", "guards.sampler_gap.ceiling=99",
    "guards.stale_gap.ceiling=99",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    name: str
    settings: tuple[str, ...]
    ranks: int = 1
    servers: int = 0

    def command(self, folder: Path, urls: Sequence[str]) -> list[str]:
        """The same for each attempt at one run. folder: the run's."""
        served = [f"generation.servers.urls=[{','.join(urls)}]"] if urls else []
        return ["train", *_COMMON, *self.settings, *served, f"output_dir={folder.parent}", f"name={folder.name}"]


JOBS = (
    Job("grpo", _GRPO),
    Job("idpo", _IDPO),
    Job("background", (*_GRPO, "checkpoint.asynchronous=true", "checkpoint.every_steps=1")),
    Job("served", (*_GRPO, *_SERVED), servers=2),
    Job("ahead", (*_GRPO, *_SERVED, "generation.one_step_off=true", "grpo.sampler_correction=tis"), servers=1),
    Job("two", (*_GRPO, "parallelism.use_distributed_optimizer=true"), ranks=2),
)
