"""A run of Algorithm 1 on fakes that keep a journal of what was done, in order; and objectives on tables."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.scripted_engine import ScriptedEngine
from torch import Tensor

from nemo_edo.algorithms.grpo import GRPO
from nemo_edo.algorithms.idpo import IDPO
from nemo_edo.algorithms.iteration import run_iterations
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.services import Position, Progress, Services
from nemo_edo.config import BoundsConfig, GRPOConfig, GuardsConfig, IDPOConfig, SamplingConfig
from nemo_edo.errors import RunStopped
from nemo_edo.generation.in_process import InProcessSync
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Problem, TrainingBatch

PAD, STOP, FIRST_CHARACTER = 0, 1, 2
MAX_NEW_TOKENS = 64


@dataclass
class FakePolicy:
    """Its log-probabilities are functions of tokens and of the number of steps taken, the reference's without it."""

    journal: Journal
    entropy: float
    gradient_ratio: float
    broken_steps: Collection[int]
    """Numbers, from 1 on, of the steps whose loss is not finite."""
    batches: list[TrainingBatch] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """The exploration weight of each step."""

    def train_step(self, batch: TrainingBatch, *, exploration_weight: float, grad_norm_limit: float) -> dict:
        self.journal.events.append(("train_step",))
        self.batches.append(batch)
        self.weights.append(exploration_weight)
        broken = len(self.batches) in self.broken_steps
        return {"loss": math.nan if broken else float(len(self.batches)), "entropy": self.entropy, "grad_norm": 1.0,
                "skipped": float(broken)}

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        self.journal.events.append(("gradients", len(self.batches)))
        return self.gradient_ratio

    def move_reference(self, kind: str, decay: float) -> None:
        self.journal.events.append(("reference", kind, decay))

    def logprobs(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        logprobs = self.reference_logprobs(batch) - 0.1 * len(self.batches)
        return logprobs, -0.5 * logprobs

    def reference_logprobs(self, batch: TrainingBatch) -> Tensor:
        return -0.01 * batch.tokens[:, 1:].float()


@dataclass
class Journal:
    """What a run did: ("evaluate", t), ("reference", kind, decay), ("generate", version, requests), ("write", t),
    ("gradients", steps taken), ("train_step",), ("push", version), ("release",)."""

    store: RolloutStore
    events: list[tuple] = field(default_factory=list)
    lines: list[dict] = field(default_factory=list)
    """What the run logged, but for the time."""
    times: list[tuple[str, dict]] = field(default_factory=list)
    """The times that it logged, with the line's kind."""
    policy: FakePolicy | None = None

    def of_kind(self, kind: str) -> list[tuple]:
        return [event for event in self.events if event[0] == kind]

    def lines_of(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line["kind"] == kind]


@dataclass(frozen=True)
class FakeRun:
    """Algorithm 1's services, all fakes, its plan, and what it did."""

    services: Services
    plan: Plan
    journal: Journal

    def changed(self, **changes) -> FakeRun:
        """With other fields of either record."""
        of_plan = {name: changes.pop(name) for name in list(changes) if name in Plan.__dataclass_fields__}
        return FakeRun(replace(self.services, **changes), replace(self.plan, **of_plan), self.journal)

    def run(self) -> Journal:
        run_iterations(self.services, self.plan, lambda t: self.journal.events.append(("evaluate", t)))
        return self.journal


class Memory(Progress):
    """A Progress that keeps everything in memory, and stops the run at the n-th place where that may be done."""

    def __init__(self, start: Position | None = None, collected=None, stop_at: int | None = None) -> None:
        self.start, self.collected, self.stop_at = start or Position(), collected, stop_at
        self.positions: list[Position] = []
        """Where the training could resume."""
        self.places = 0
        self.asked: list[tuple] = []
        """What was to be saved at once, and the batches to be kept, in order."""

    def reached(self, position: Position, *, saves: bool = True) -> None:
        self.places += 1
        if saves:
            self.positions.append(position)
        if self.places == self.stop_at:
            raise RunStopped

    def save(self, position: Position) -> None:
        self.asked.append(("save", position))

    def keep_failure(self, position, batch, about) -> str:
        self.asked.append(("failure", position, batch, about))
        return "failures/it"

    def keep(self, collected) -> None:
        self.collected = collected

    def kept(self):
        return self.collected


@pytest.fixture
def new_memory() -> type[Memory]:
    return Memory


@pytest.fixture
def fake_iteration(tmp_path: Path):
    """fake_iteration(algorithm="grpo", problems=..., ..., **settings of the objective): a FakeRun. To the ``hopeless``
    problems no response is right; of the others' responses every fourth is. No sampler_gap guard: the scripted
    engine's log-probabilities are far from the policy's."""

    def build(*, algorithm: str = "grpo", folder: str = "rollouts", problems: int = 3, samples_per_prompt: int = 4,
              seed: int = 42, hopeless: Collection[str] = (), entropy: float = 0.5, gradient_ratio: float = 2.0,
              broken_steps: Collection[int] = (), guards: GuardsConfig | None = None, **settings) -> FakeRun:
        class Engine(ScriptedEngine):
            def generate(self, requests, sampling):
                journal.events.append(("generate", self.policy_version, len(requests)))
                return super().generate(requests, sampling)

        class Sync(InProcessSync):
            def push(self, version):
                journal.events.append(("push", version))
                super().push(version)

            def release(self):
                journal.events.append(("release",))

        class Store(RolloutStore):
            def write(self, iteration, scored):
                path = super().write(iteration, scored)
                journal.events.append(("write", iteration))
                return path

        def script(request, _) -> str:
            # The seed in the text makes every response unique.
            return f"{request.seed}\n#### {0 if request.problem_id in hopeless else request.sample_index % 4}"

        def log(kind: str, **values) -> None:
            journal.times.append((kind, values.pop("time", {})))
            journal.lines.append({"kind": kind, **values})

        journal = Journal(Store(tmp_path / folder))
        journal.policy = FakePolicy(journal, entropy, gradient_ratio, broken_steps)
        engine = Engine(script, encode=lambda text: [ord(c) + FIRST_CHARACTER for c in text],
                        decode=lambda ids: "".join(chr(i - FIRST_CHARACTER) for i in ids), stop_id=STOP, log_prob=-0.3)
        rows = [Problem(f"p-{i}", f"q{i}", "#### 1", "1", f"p.jsonl:{i}") for i in range(problems)]
        if algorithm == "grpo":
            objective = GRPO(GRPOConfig(**settings), {row.id: row.question for row in rows}, MAX_NEW_TOKENS, PAD)
        else:
            objective = IDPO(IDPOConfig(**settings), pad_id=PAD, seed=seed)
        plan = Plan(
            config=objective.config, problems=rows, prompts={row.id: (10 + i, 7) for i, row in enumerate(rows)},
            sampling=SamplingConfig(samples_per_prompt=samples_per_prompt, max_new_tokens=MAX_NEW_TOKENS),
            seed=seed, guards=replace(guards or GuardsConfig(), sampler_gap=BoundsConfig(), stale_gap=BoundsConfig()),
        )
        services = Services(policy=journal.policy, engine=engine, weight_sync=Sync(engine), scorer=ExactAnswerScorer(),
                            objective=objective, store=journal.store, log=log)
        return FakeRun(services, plan, journal)

    return build


@pytest.fixture
def go(fake_iteration):
    """go(settings, memory, folder=..., before=a journal): returns the journal, and whether the run finished. The policy
    has taken the steps of ``before`` up to the place that it resumes from, like one from a checkpoint."""

    def run(settings: dict, memory: Memory, *, folder: str, before: Journal | None = None, lag: int = 0):
        iteration = fake_iteration(folder=folder, **settings).changed(progress=memory, part_size=5, lag=lag)
        policy, taken = iteration.journal.policy, memory.start.steps_taken
        if before:
            policy.batches, policy.weights = before.policy.batches[:taken], before.policy.weights[:taken]
        try:
            return iteration.run(), True
        except RunStopped:
            return iteration.journal, False

    return run


@pytest.fixture
def run_fake(fake_iteration):
    """run_fake(...) as ``fake_iteration``: runs Algorithm 1 to its end and returns the journal."""
    return lambda **given: fake_iteration(**given).run()


@pytest.fixture
def table_policy():
    """table_policy(log-probabilities, entropies, those of the reference): a policy that gives back these tables."""

    def make(logprobs=None, entropies=None, reference=None):
        def look_up(table, batch: TrainingBatch) -> Tensor:
            return torch.full_like(batch.mask, -0.5) if table is None else torch.tensor(table)

        return SimpleNamespace(logprobs=lambda batch: (look_up(logprobs, batch), look_up(entropies, batch)),
                               reference_logprobs=lambda batch: look_up(reference, batch))

    return make
