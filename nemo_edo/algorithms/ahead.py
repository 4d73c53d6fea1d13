"""One step off: the next iteration's responses are drawn while this one trains.

Iteration 0 and 1 are drawn by policy 0, every later iteration t by policy t - 1, which was the newest when the drawing
began. A thread draws and puts parts on disk; the iteration then finds its responses there, as it does after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, Protocol

from nemo_edo.algorithms.collection import Collected
from nemo_edo.algorithms.progress import Position, Progress
from nemo_edo.types import TrainingBatch

DrawAhead = Callable[[int, Event], dict[str, float]]
"""Draws an iteration's responses onto the disk, unless the event tells it to end first; returns its speed."""


class Ahead(Protocol):
    """A drawing beside the training. Every rank calls its methods at the same places."""

    speed: dict[str, float]
    """Of the last drawing that came to its end, on the rank that draws."""

    def begin(self, iteration: int) -> None:
        """Begins to draw the iteration's responses; the drawing before it has been finished."""

    def is_done(self) -> bool:
        """Whether nothing is being drawn any more."""

    def finish(self) -> None:
        """Waits for the drawing. Raises what has ended it."""

    def stop(self) -> None:
        """Ends the drawing, whether it is done or not; its whole parts stay on disk."""


class InBackground:
    """``Ahead`` in a thread, which uses no process group: the main thread's collectives would meet its own."""

    def __init__(self, draw: DrawAhead) -> None:
        self.speed: dict[str, float] = {}
        self._draw = draw
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draw ahead")
        self._drawing: Future | None = None
        self._ends = Event()

    def begin(self, iteration: int) -> None:
        self._drawing = self._pool.submit(self._draw, iteration, self._ends)

    def is_done(self) -> bool:
        return self._drawing is None or self._drawing.done()

    def finish(self) -> None:
        if self._drawing is not None:
            drawing, self._drawing = self._drawing, None
            self.speed = drawing.result()

    def stop(self) -> None:
        self._ends.set()
        self._pool.shutdown(wait=True)


class SavesBetween:
    """A ``Progress`` that saves nothing while responses are drawn ahead: they need the weights of the iteration's
    begin, which a checkpoint from its middle has lost."""

    def __init__(self, progress: Progress, ahead: Ahead) -> None:
        self.start = progress.start
        self._progress = progress
        self._ahead = ahead

    def reached(self, position: Position, *, saves: bool = True) -> None:
        if position.step and not self._ahead.is_done():
            self._progress.reached(position, saves=False)
            return
        if position.step:
            self._ahead.finish()  # what has ended it is told now, not when the iteration is over
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
