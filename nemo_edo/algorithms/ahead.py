"""One step off: the next iteration's samples are generated while this one trains.

Policy 0 generates those of iterations 0 and 1, policy t - 1 those of every later iteration t: it is the newest when
generation begins. A thread generates, scores and puts parts on disk; the iteration then finds them there, as it does
after a restart.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event

from nemo_edo.algorithms.plan import Plan
from nemo_edo.algorithms.samples import generate_samples
from nemo_edo.algorithms.services import Ahead, Position, Progress, Services
from nemo_edo.errors import RunStopped
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
