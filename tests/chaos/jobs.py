"""The tiny runs that faults happen to."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers import completions_server
from helpers.problem_files import write_sums
from helpers.tiny_models import write_tiny_model

KEY = {"CHAOS_KEY": completions_server.KEY}
"""The key that ``helpers.completions_server`` asks for."""
_COMMON = (
    "--config-name=quickstart", "~arms", "replicate_baseline=false", "sft.steps=3", "sft.batch_size=8",
    "sampling.samples_per_prompt=2",
    "sampling.max_new_tokens=6", "data.arithmetic.train_problems=6", "data.arithmetic.test_problems=4",
    "data.arithmetic.warmup_problems=24", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10",
    "generation.part_size=4", "checkpoint.every_steps=2", "grpo.iterations=2",
    "grpo.minibatch_size=4", "grpo.micro_batch_size=4", "idpo.iterations=2", "idpo.minibatch_size=3",
    "idpo.micro_batch_size=8",
)  # fmt: skip
_BUILT_IN = ("model.architecture.hidden_size=64", "model.architecture.intermediate_size=64")
_REWARD = ("rewards.function=tests.chaos.reward:score",)
_ANY_TEXT = ("data.answer_format=pattern", "data.answer_pattern='.+'")
"""So that a judge is asked about every response."""
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
    has_inputs: bool = False
    """Whether its model, its problems and its reward are files next to its folder."""
    has_judge: bool = False
    is_sweep: bool = False

    def command(self, folder: Path, urls: Sequence[str]) -> list[str]:
        """The same for each attempt at one run. folder: the run's. urls: the servers', or the judge's."""
        urls_of = "rewards.judge.url={}" if self.has_judge else "generation.servers.urls=[{}]"
        settings = [*self.settings, *([urls_of.format(",".join(urls))] if urls else [])]
        if self.has_inputs:
            here = self.inputs(folder)
            settings += [f"data.{split}={here / split}.jsonl" for split in ("warmup", "train", "test")]
            settings += [f"model.path={here / 'model'}", "model.architecture=null", "rewards.function=own:score",
                         "model.verify=false"]  # the comparison with transformers takes longer than the rest
        else:
            settings += [*_BUILT_IN, *(() if self.has_judge else _REWARD)]
        many = ["-m"] if self.is_sweep else []
        return ["train", *many, *_COMMON, *settings, f"output_dir={folder.parent}", f"name={folder.name}"]

    def inputs(self, folder: Path) -> Path:
        return folder.parent / "inputs"

    def prepare(self, folder: Path) -> None:
        """Writes its inputs."""
        if self.has_inputs:
            here = write_tiny_model(self.inputs(folder) / "model").parent
            write_sums(here, lambda a, b: a == 2, tested=4)
            shutil.copy(Path(__file__).with_name("reward.py"), here / "own.py")

    def runs(self, folder: Path) -> list[Path]:
        """The folders of its runs."""
        return [folder / f"alpha={alpha}" for alpha in SWEPT] if self.is_sweep else [folder]


SWEPT = ("0", "0.5")
JOBS = (
    Job("grpo", _GRPO),
    Job("idpo", _IDPO),
    Job("background", (*_GRPO, "checkpoint.asynchronous=true", "checkpoint.every_steps=1")),
    Job("served", (*_GRPO, *_SERVED), servers=2),
    Job("ahead", (*_GRPO, *_SERVED, "generation.one_step_off=true", "grpo.sampler_correction=tis"), servers=1),
    Job("two", (*_GRPO, "parallelism.use_distributed_optimizer=true"), ranks=2),
    Job("files", _GRPO, has_inputs=True),
    Job("judged", (*_GRPO, *_ANY_TEXT, "rewards.verifier=judge", "rewards.judge.model=judge"), has_judge=True),
    Job("sweep", (f"grpo.alpha={','.join(SWEPT)}",), is_sweep=True),
)
