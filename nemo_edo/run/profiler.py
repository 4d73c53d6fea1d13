"""A trace of some optimizer steps of each arm: what ran when, on the CPU and on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nemo_edo.algorithms.services import Log


class StepProfiler:
    """A log that profiles from one optimizer step to another while it hands on what it gets.

    The trace, in Chrome's format (chrome://tracing, Perfetto, TensorBoard), has the steps ``first`` to ``last`` - 1 and
    what is between them, generation for example. On a GPU the same span is an NVTX range, ``STAGE steps FIRST-LAST``,
    between cudaProfilerStart and cudaProfilerStop, which ``nsys profile --capture-range=cudaProfilerApi`` looks for.
    """

    def __init__(self, log: Log, steps: tuple[int, int], path: Path, name: str, next_step: int = 0) -> None:
        """path: of the trace. name: of the range. next_step: the step that is taken next, in a resumed run not 0."""
        self._log = log
        self._first, self._last = steps
        self._path = path
        self._name = f"{name} steps {self._first}-{self._last}"
        self._profile: profile | None = None
        if next_step == self._first:
            self._begin()

    def __call__(self, kind: str, **values: Any) -> None:
        self._log(kind, **values)
        if kind == "train_step":
            if values["step"] + 1 == self._last:
                self.close()
            elif values["step"] + 1 == self._first:
                self._begin()

    def close(self) -> None:
        """Ends the trace, if one is in progress, and writes it."""
        if self._profile is None:
            return
        self._profile.stop()
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        print(f"profile of {self._name}: {self._path}", flush=True)
        self._profile = None

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.profiler.start()
            torch.cuda.nvtx.range_push(self._name)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()
