"""One step off: the next iteration's samples are generated while this one trains.

Policy 0 generates those of iterations 0 and 1, policy t - 1 those of every later iteration t: it is the newest when
generation begins. A thread generates, scores and puts parts on disk; the iteration then finds them there, as it does
after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, Protocol

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.progress import Position, Progress
from nemo_edo.algorithms.samples import generate_samples
from nemo_edo.errors import RunStopped
from nemo_edo.interfaces import GenerationEngine, Scorer
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import TrainingBatch

GenerateAhead = Callable[[int, Event], dict[str, float]]
"""Puts an iteration's samples on disk, unless the event tells it to end first; returns its speed."""


class Ahead(Protocol):
    """Generation alongside the training. Every rank calls its methods at the same places."""

    speed: dict[str, float]
    """Speed of the last finished generation, on the rank that generates."""

    def begin(self, iteration: int) -> None:
        """Starts to generate the iteration's samples; the previous generation has finished."""

    def is_done(self) -> bool:
        """Whether nothing is being generated."""

    def finish(self) -> None:
        """Waits until all samples are on disk. Raises what ended their generation."""

    def close(self) -> None:
        """Ends the generation, done or not; its finished parts stay on disk."""


class NothingAhead:
    """``Ahead`` of a run in which every iteration generates its own samples."""

    speed: dict[str, float] = {}

    def begin(self, iteration: int) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class InBackground:
    """``Ahead`` in a thread, which uses no process group: the main thread's collectives would meet its own."""

    def __init__(self, generate: GenerateAhead) -> None:
        self.speed: dict[str, float] = {}
        self._generate = generate
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate ahead")
        self._running: Future | None = None
        self._ends = Event()

    def begin(self, iteration: int) -> None:
        self._running = self._pool.submit(self._generate, iteration, self._ends)

    def is_done(self) -> bool:
        return self._running is None or self._running.done()

    def finish(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self.speed = running.result()

    def close(self) -> None:
        self._ends.set()
        self._pool.shutdown(wait=True)


def generate_ahead(
    plan: Plan, t: int, stop: Event, *, engine: GenerationEngine, scorer: Scorer, store: RolloutStore
) -> dict[str, float]:
    """Puts the parts of iteration t's samples on disk, where ``iteration.generate_and_score`` finds them, and returns
    the speed.

    Engine and store belong to this process alone: no other rank takes part. Raises RunStopped once ``stop`` is set.
    """

    def stop_if_asked() -> None:
        if stop.is_set():
            raise RunStopped(f"stopped, with the finished parts of iteration {t} saved")

    return generate_samples(plan, t, engine=engine, scorer=scorer, store=store, before_part=stop_if_asked).speed


class SavesBetween:
    """A ``Progress`` that saves nothing while the next samples are generated: they need the weights that the iteration
    began with, and a checkpoint from its middle has others."""

    def __init__(self, progress: Progress, ahead: Ahead) -> None:
        self.start = progress.start
        self._progress = progress
        self._ahead = ahead

    def reached(self, position: Position, *, saves: bool = True) -> None:
        if position.step and not self._ahead.is_done():
            self._progress.reached(position, saves=False)
            return
        if position.step:
            self._ahead.finish()  # an error that ended it is raised now, not at the iteration's end
        self._progress.reached(position, saves=saves)

    def save(self, position: Position) -> None:
        if position.step:
            self._ahead.finish()
        self._progress.save(position)

    def keep_failure(self, position: Position, batch: TrainingBatch, about: dict[str, Any]) -> str:
        return self._progress.keep_failure(position, batch, about)

    def keep(self, iteration: int, collected: Collected) -> None:
        self._progress.keep(iteration, collected)

    def kept(self, iteration: int) -> Collected:
        return self._progress.kept(iteration)
