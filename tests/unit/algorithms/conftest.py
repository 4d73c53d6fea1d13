"""A run of Algorithm 1 on fakes that keep a journal of what was done, in order; and objectives on tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_edo.algorithms.collection import Objective
from nemo_edo.algorithms.grpo import GRPO
from nemo_edo.algorithms.idpo import IDPO
from nemo_edo.algorithms.iteration import Iteration, run_iterations
from nemo_edo.algorithms.progress import FromTheBeginning, Position
from nemo_edo.config import BoundsConfig, GRPOConfig, GuardsConfig, IDPOConfig, SamplingConfig
from nemo_edo.data.rollout_store import RolloutStore
from nemo_edo.errors import RunStopped
from nemo_edo.generation.fake import ScriptedEngine
from nemo_edo.refit.in_process import InProcessSync
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.types import Problem, Rollout, ScoredRollout, TrainingBatch

PAD, STOP, FIRST_CHARACTER = 0, 1, 2
MAX_NEW_TOKENS = 64


@dataclass
class FakePolicy:
    """Its log-probabilities are functions of tokens and of the number of steps taken, the reference's without it."""

    record: Callable[[tuple], None]
    before_step: Callable[[], None]
    entropy: float = 0.5
    gradient_ratio: float = 2.0
    broken_steps: Collection[int] = ()
    """Which of them, from 1 on, have a loss that is not finite."""
    batches: list[TrainingBatch] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """The exploration weight of each step."""

    def train_step(self, batch: TrainingBatch, *, exploration_weight: float | None = None,
                   grad_norm_limit: float) -> dict[str, float]:
        self.before_step()
        self.record(("train_step",))
        self.batches.append(batch)
        self.weights.append(exploration_weight)
        broken = len(self.batches) in self.broken_steps
        return {"loss": math.nan if broken else float(len(self.batches)), "entropy": self.entropy, "grad_norm": 1.0,
                "skipped": float(broken)}

    def exploration_gradient_ratio(self, batch: TrainingBatch) -> float:
        self.record(("gradients", len(self.batches)))
        return self.gradient_ratio

    def move_reference(self, kind: str, decay: float) -> None:
        self.record(("reference", kind, decay))

    def log_probs(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        log_probs = self.reference_log_probs(batch) - 0.1 * len(self.batches)
        return log_probs, -0.5 * log_probs

    def reference_log_probs(self, batch: TrainingBatch) -> Tensor:
        return -0.01 * batch.tokens[:, 1:].float()


@dataclass
class Journal:
    """What a run did: ("evaluate", t), ("reference", kind, decay), ("generate", version, requests), ("write", t),
    ("gradients", steps taken), ("train_step",), ("push", version), ("release",)."""

    events: list[tuple] = field(default_factory=list)
    lines: list[dict] = field(default_factory=list)
    """What the run logged, but for the time."""
    times: list[tuple[str, dict]] = field(default_factory=list)
    """What it logged of that, with the line's kind."""
    on_disk: list[int] = field(default_factory=list)
    """Rollouts that the store held before each train step, over all iterations."""
    policy: FakePolicy | None = None
    store: RolloutStore | None = None

    def collected(self, iteration: int) -> list[ScoredRollout]:
        return self.store.read(iteration)

    def of_kind(self, kind: str) -> list[tuple]:
        return [event for event in self.events if event[0] == kind]


@dataclass(frozen=True)
class Setting:
    """Of a fake run, beside the objective's config."""

    problems: int = 3
    samples_per_prompt: int = 4
    seed: int = 42
    hopeless: Collection[str] = ()
    """Ids of problems to which no response is right; of the others' responses every fourth is."""
    entropy: float = 0.5
    gradient_ratio: float = 2.0
    broken_steps: Collection[int] = ()
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    sampler_gap: BoundsConfig = field(default_factory=BoundsConfig)
    """Of the guards; none by itself: the scripted engine's log-probabilities are far from the policy's."""
    write_rollouts: bool = True
    folder: str = "rollouts"


@pytest.fixture
def new_journal() -> type[Journal]:
    return Journal


class Memory(FromTheBeginning):
    """A Progress that keeps everything in memory, and stops the run at the n-th place where that may be done."""

    def __init__(self, start: Position | None = None, collected=None, stop_at: int | None = None) -> None:
        self.start, self.collected, self.stop_at = start or Position(), collected, stop_at
        self.positions: list[Position] = []
        """Where the training could be gone on with."""
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

    def keep(self, iteration: int, collected) -> None:
        self.collected = collected

    def kept(self, iteration: int):
        return self.collected


@pytest.fixture
def new_memory() -> type[Memory]:
    return Memory


@pytest.fixture
def fake_iteration(tmp_path: Path):
    """fake_iteration(algorithm="grpo", problems=..., ..., **settings of the objective): the Iteration, and where
    ``journal`` is given, what it does is told there."""

    def build(*, algorithm: str = "grpo", journal: Journal | None = None, **given) -> Iteration:
        of_run = {name: given.pop(name) for name in list(given) if name in Setting.__dataclass_fields__}
        config = {"grpo": GRPOConfig, "idpo": IDPOConfig}[algorithm](**given)
        return _fake_iteration(journal or Journal(), tmp_path, Setting(**of_run), config)

    return build


@pytest.fixture
def go(fake_iteration, new_journal):
    """go(settings, memory, folder=..., before=a journal): runs on from where ``before`` ended; gives the journal, and
    whether it came to the end. The policy has the steps of ``before`` behind it, like one from a checkpoint."""

    def run(settings: dict, memory: Memory, *, folder: str, before=None):
        journal = new_journal()
        iteration = fake_iteration(journal=journal, folder=folder, **settings)
        iteration = replace(iteration, progress=memory, part_size=5)
        if before:
            iteration.policy.batches.extend(before.policy.batches)
            iteration.policy.weights.extend(before.policy.weights)
        try:
            run_iterations(iteration, lambda t: journal.lines.append({"kind": "evaluation", "iteration": t}))
        except RunStopped:
            return journal, False
        return journal, True

    return run


@pytest.fixture
def run_fake(fake_iteration):
    """run_fake(...) as ``fake_iteration``: runs Algorithm 1 to its end and returns the journal."""

    def run(**given) -> Journal:
        journal = Journal()
        run_iterations(fake_iteration(journal=journal, **given), lambda t: journal.events.append(("evaluate", t)))
        return journal

    return run


def _objective(config: GRPOConfig | IDPOConfig, questions: dict[str, str], *, seed: int, pad_id: int = PAD,
               max_new_tokens: int = MAX_NEW_TOKENS) -> Objective:
    if isinstance(config, IDPOConfig):
        return IDPO(config, pad_id=pad_id, seed=seed)
    return GRPO(config, questions, max_new_tokens, pad_id)


def _fake_iteration(journal: Journal, root: Path, setting: Setting, config: GRPOConfig | IDPOConfig) -> Iteration:
    folder = root / setting.folder

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
        def write(self, iteration, scored, **place):
            journal.events.append(("write", iteration))
            return super().write(iteration, scored, **place)

    def before_step() -> None:
        journal.on_disk.append(sum(len(journal.store.drawn(t)) for t in range(len(list(folder.glob("iter_*"))))))

    def script(request, _) -> str:
        # The seed in the text makes every response unlike any other.
        wrong = request.problem_id in setting.hopeless
        return f"{request.seed}\n#### {0 if wrong else request.sample_index % 4}"

    def log(kind: str, **values) -> None:
        journal.times.append((kind, values.pop("time", {})))
        journal.lines.append({"kind": kind, **values})

    engine = Engine(script, encode=lambda text: [ord(c) + FIRST_CHARACTER for c in text],
                    decode=lambda ids: "".join(chr(i - FIRST_CHARACTER) for i in ids), stop_id=STOP, log_prob=-0.3)
    journal.policy = FakePolicy(journal.events.append, before_step, setting.entropy, setting.gradient_ratio,
                                setting.broken_steps)
    journal.store = Store(folder)
    rows = [Problem(f"p-{i}", f"q{i}", "#### 1", "1", f"p.jsonl:{i}") for i in range(setting.problems)]
    return Iteration(
        policy=journal.policy, engine=engine, weight_sync=Sync(engine), scorer=ExactAnswerScorer(),
        store=journal.store, problems=rows, prompts={row.id: (10 + i, 7) for i, row in enumerate(rows)},
        objective=_objective(config, {row.id: row.question for row in rows}, seed=setting.seed),
        sampling=SamplingConfig(samples_per_prompt=setting.samples_per_prompt, max_new_tokens=MAX_NEW_TOKENS),
        seed=setting.seed, write_rollouts=setting.write_rollouts,
        guards=replace(setting.guards, sampler_gap=setting.sampler_gap, stale_gap=BoundsConfig()),
        log=log,
    )


# --- objectives on their own ----------------------------------------------------------------------------------------


class TablePolicy:
    """Gives back the tables that it is made of, and counts the questions."""

    def __init__(self, log_probs=None, entropies=None, reference=None) -> None:
        self.tables = {"log_probs": log_probs, "entropies": entropies, "reference": reference}
        self.asked: list[str] = []

    def _table(self, name: str, batch: TrainingBatch) -> Tensor:
        table = self.tables[name]
        return torch.full_like(batch.mask, -0.5) if table is None else torch.tensor(table)

    def log_probs(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        self.asked.append("log_probs")
        return self._table("log_probs", batch), self._table("entropies", batch)

    def reference_log_probs(self, batch: TrainingBatch) -> Tensor:
        self.asked.append("reference")
        return self._table("reference", batch)


@pytest.fixture
def table_policy() -> type[TablePolicy]:
    return TablePolicy


@pytest.fixture
def scored():
    """scored("a", 0, (1, 2), 1.0): a response to problem a with these tokens and this reward, after prompt (5, 6)."""

    def make(problem: str, index: int, response: tuple[int, ...], reward: float, *, log_prob: float = -0.7,
             **changes) -> ScoredRollout:
        rollout = Rollout(problem, index, (5, 6), response, (log_prob,) * len(response), "text", True, 0, index)
        of_rollout = {name: changes.pop(name) for name in list(changes) if name in Rollout.__dataclass_fields__}
        item = ScoredRollout(replace(rollout, **of_rollout), reward, None, True, "")
        return replace(item, **changes)

    return make


@pytest.fixture
def four(scored) -> list[ScoredRollout]:
    """Two groups, interleaved; responses of 1 to 5 tokens. Rewards of a differ, those of b are equal."""
    return [
        scored("a", 0, (1, 2, 3, 4, 5), 1.0, answer="1"),
        scored("b", 0, (7, 8), 0.0, well_formed=False, finished=False),
        scored("a", 1, (1, 2, 3, 4), 0.0, well_formed=False, answer="2"),
        scored("b", 1, (9,), 0.0, answer="1"),
    ]


@pytest.fixture
def build():
    """build(scored, policy, config): (what the config's objective collects, the objective)."""

    def collect(samples, policy, config: GRPOConfig | IDPOConfig, *, questions=None, seed: int = 0, **settings):
        questions = questions or {item.rollout.problem_id: "1 + 2 + 3" for item in samples}
        objective = _objective(config, questions, seed=seed, **settings)
        return objective.build(samples, policy), objective

    return collect
