"""One step off: the next iteration's samples are generated while this one trains.

Policy 0 generates those of iterations 0 and 1, policy t - 1 those of every later iteration t: it is the newest when
generation begins. A thread generates, scores and puts parts on disk; the iteration then finds them there, as it does
after a restart.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event
from typing import Any

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.progress import Ahead, Position, Progress
from nemo_edo.algorithms.samples import generate_samples
from nemo_edo.algorithms.services import Services
from nemo_edo.errors import RunStopped
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.phases import PhaseClock

LOOKED_EVERY_S = 0.5
"""How often a training that waits for responses looks whether it is asked to stop."""


class InBackground(Ahead):
    """Generates in a thread, which calls no worker: the main thread does."""

    def __init__(self, run: Services, plan: Plan) -> None:
        """run: its store is this thread's alone."""
        self.speed: dict[str, float] = {}
        self.stop = Event()
        self._clock, self._plan = run.clock, plan
        self._progress = run.progress
        self._waits = Event()
        self._run = replace(run, progress=_Stoppable(self.stop, self._waits, run.progress), clock=PhaseClock())
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate ahead")
        self._running: Future | None = None

    def begin(self, iteration: int) -> None:
        self._running = self._pool.submit(generate_samples, self._run, self._plan, Position(iteration))

    def is_done(self) -> bool:
        return self._running is None or self._running.done()

    def finish(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self._waits.set()
            with self._clock.phase("wait"):
                while not wait([running], LOOKED_EVERY_S).done:
                    self._progress.stop_if_asked()
                self.speed = running.result().speed
            self._waits.clear()

    def close(self) -> None:
        self.stop.set()
        with self._clock.phase("wait"):
            self._pool.shutdown(wait=True)


class _Stoppable(Progress):
    """Ends generation. Its signs of life count while the training ``waits`` for it: otherwise that gives its own."""

    def __init__(self, stop: Event, waits: Event, training: Progress) -> None:
        self._stop, self._waits, self._training = stop, waits, training

    def reached(self, position: Position, *, saves: bool = True) -> None:
        self.stop_if_asked()

    def alive(self) -> None:
        if self._waits.is_set():
            self._training.alive()

    def stop_if_asked(self) -> None:
        if self._stop.is_set():
            raise RunStopped("stopped, with the responses that had ended saved")


class SavesBetween(Progress):
    """Saves nothing while the next samples are generated: they need the weights that the iteration began with, and a
    checkpoint from its middle has others."""

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

    def alive(self) -> None:
        self._progress.alive()

    def stop_if_asked(self) -> None:
        self._progress.stop_if_asked()

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
