"""Where a run's wall time goes: seconds by phase, each second in exactly one of them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = {
    "start": "imports, checks, data files, the model",
    "data": "batches, statistics, rollouts on disk, the log",
    "generate": "the engine, in collections",
    "score": "rewards, in collections",
    "log_pi_old": "log-probabilities of the policy that sampled",
    "log_pi_ref": "log-probabilities of the reference",
    "train": "forward, backward, optimizer",
    "checkpoint": "saving and loading",
    "refit": "new weights to the engine",
    "evaluate": "the test problems: generation, scoring, statistics",
    "wait": "for responses that are generated in the background",
    "report": "the summary and the report",
}
"""The work that each phase contains."""
NOTHING = dict.fromkeys(("wall", *PHASES), 0.0)


class PhaseClock:
    """Measures phases in the thread that made it. One phase within another interrupts it, so none is counted twice.
    now: a clock in seconds. begun: what it showed when the start began, where that was before this object was made."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, begun: float | None = None) -> None:
        self._now = now
        self._open: list[str] = []
        self._continued = False
        self._mark = self._now()
        started = 0.0 if begun is None else self._mark - begun
        self._spent = {**NOTHING, "wall": started, "start": started}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything within belongs to the phase, except what is in a phase within it."""
        self._note()
        self._open.append(name)
        try:
            yield
        finally:
            self._note()
            self._open.pop()

    def pending(self) -> dict[str, float]:
        """Seconds since the last ``take``: "wall_s", and PHASE_s of each of ``PHASES``."""
        self._note()
        return {f"{name}_s": round(seconds, 4) for name, seconds in self._spent.items()}

    def take(self) -> dict[str, float]:
        """The ``pending`` seconds, which then begin at 0 again."""
        taken = self.pending()
        self._spent = dict(NOTHING)
        return taken

    def carry_on(self, pending: Mapping[str, float]) -> None:
        """Adds a killed process's ``pending`` seconds, at the first call alone: later ones are this process's own."""
        if self._continued:
            return
        self._continued = True
        for name in self._spent:
            self._spent[name] += pending.get(f"{name}_s", 0.0)

    def _note(self) -> None:
        """Adds the time since the last note to the wall time, and to the phase that is in progress, if any."""
        now = self._now()
        for name in ("wall", *self._open[-1:]):
            self._spent[name] += now - self._mark
        self._mark = now
