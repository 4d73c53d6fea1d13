"""A run of Algorithm 1 on fakes that keep a journal of what was done, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch import Tensor

from nemo_edo.algorithms.iteration import Iteration, run_iterations
from nemo_edo.config import GRPOConfig, SamplingConfig
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.generation.fake import ScriptedEngine
from nemo_edo.refit.in_process import InProcessSync
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Problem, TrainingBatch

PAD, STOP, FIRST_CHARACTER = 0, 1, 2


class FakePolicy:
    """Its log-probabilities are functions of tokens and of the number of steps taken, the reference's without it."""

    def __init__(self, before_step: Callable[[], None] = lambda: None) -> None:
        self.batches: list[TrainingBatch] = []
        self.before_step = before_step

    def train_step(self, batch: TrainingBatch) -> dict[str, float]:
        self.before_step()
        self.batches.append(batch)
        return {"loss": float(len(self.batches))}

    def log_probs(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        log_probs = self.reference_log_probs(batch) - 0.1 * len(self.batches)
        return log_probs, -0.5 * log_probs

    def reference_log_probs(self, batch: TrainingBatch) -> Tensor:
        return -0.01 * batch.tokens[:, 1:].float()


@dataclass
class Journal:
    """What a run did: ("evaluate", t), ("generate", version), ("write", t), ("train_step",), ("push", version)."""

    events: list[tuple] = field(default_factory=list)
    lines: list[dict] = field(default_factory=list)
    """What the run logged."""
    on_disk: list[int] = field(default_factory=list)
    """Rollouts that the store held before each train step, over all iterations."""
    policy: FakePolicy | None = None
    store: RolloutStore | None = None

    def collected(self, iteration: int):
        return self.store.read(iteration)


@pytest.fixture
def run_fake(tmp_path: Path):
    """run_fake(problems=..., seed=..., samples_per_prompt=..., **GRPO settings) runs Algorithm 1 to its end."""

    def run(*, problems: int = 3, seed: int = 42, samples_per_prompt: int = 4, write_rollouts: bool = True,
            folder: str = "rollouts", **settings) -> Journal:
        journal = Journal()
        iteration = _fake_iteration(journal, tmp_path / folder, problems, seed, write_rollouts,
                                    SamplingConfig(samples_per_prompt=samples_per_prompt), GRPOConfig(**settings))
        run_iterations(iteration, lambda t: journal.events.append(("evaluate", t)))
        return journal

    return run


@pytest.fixture
def fake_iteration(tmp_path: Path):
    """The Iteration alone, for what it says about itself."""

    def build(*, problems: int = 3, samples_per_prompt: int = 4, **settings) -> Iteration:
        return _fake_iteration(Journal(), tmp_path, problems, 42, True,
                               SamplingConfig(samples_per_prompt=samples_per_prompt), GRPOConfig(**settings))

    return build


def _fake_iteration(journal: Journal, folder: Path, problems: int, seed: int, write_rollouts: bool,
                    sampling: SamplingConfig, grpo: GRPOConfig) -> Iteration:
    class Engine(ScriptedEngine):
        def generate(self, requests, sampling):
            journal.events.append(("generate", self.policy_version))
            return super().generate(requests, sampling)

    class Sync(InProcessSync):
        def push(self, version):
            journal.events.append(("push", version))
            super().push(version)

    class Store(RolloutStore):
        def write(self, iteration, scored, **place):
            journal.events.append(("write", iteration))
            return super().write(iteration, scored, **place)

    def before_step() -> None:
        journal.events.append(("train_step",))
        journal.on_disk.append(sum(len(journal.store.read(t)) for t in range(len(list(folder.glob("iter_*"))))))

    def script(request, _) -> str:
        # The seed in the text makes every response unlike any other; a quarter of the answers are right.
        return f"{request.seed}\n#### {request.sample_index % 4}"

    engine = Engine(script, encode=lambda text: [ord(c) + FIRST_CHARACTER for c in text],
                    decode=lambda ids: "".join(chr(i - FIRST_CHARACTER) for i in ids), stop_id=STOP, log_prob=-0.3)
    journal.policy, journal.store = FakePolicy(before_step), Store(folder)
    rows = [Problem(f"p-{i}", f"q{i}", "#### 1", "1", f"p.jsonl:{i}") for i in range(problems)]
    return Iteration(
        policy=journal.policy, engine=engine, weight_sync=Sync(engine), scorer=ExactAnswerScorer(),
        store=journal.store, problems=rows, prompts={row.id: (10 + i, 7) for i, row in enumerate(rows)}, grpo=grpo,
        sampling=replace(sampling, max_new_tokens=64), pad_id=PAD, seed=seed, write_rollouts=write_rollouts,
        log=lambda kind, **values: journal.lines.append({"kind": kind, **values}),
    )
