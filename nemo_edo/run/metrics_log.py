"""The lines of metrics.jsonl, written as a run measures them and cut where it resumes, and what of them the terminal
shows: an iteration's samples, an evaluation, the time left."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from nemo_edo.errors import RESTORE, UserError
from nemo_edo.evaluation.results import POOLED, main_metrics
from nemo_edo.run_folder import logged, parsed_lines
from nemo_edo.utils.phases import PHASES
from nemo_edo.utils.status_line import StatusLine
from nemo_edo.utils.wording import clock_time

PLACES = ("iteration", "policy_version", "step")
"""Numbers of a line that say where it belongs, and are not measurements."""


class MetricsLog:
    """Adds lines to metrics.jsonl, and their numbers to NeMo's loggers.

    Everything that a clock says is under "time": the rest is the same in every run of a config. The loggers get a
    line's numbers under ARM/KIND/NAME, those under "time" as well, and the mean of a metric that has an interval; at
    the line's "step", otherwise its "iteration", otherwise the number of such lines before it.
    """

    def __init__(
        self,
        path: Path,
        log_numbers: Callable[[dict[str, float], int], None],
        *,
        watch: Callable[[str, dict[str, Any]], None] | None = None,
        pending: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """watch: gets the kind of each line that was written, and its values with its clocks. pending: returns the
        seconds of each phase that no line has yet."""
        try:
            self._file = path.open("a", encoding="utf-8")
        except IsADirectoryError as error:
            raise UserError(f"{path} is a folder, where the lines of the metrics are to be; {RESTORE}") from error
        self._digest = xxhash.xxh3_128(path.read_bytes())
        self._log_numbers = log_numbers
        self._watch = watch
        self._pending = pending
        self._start = time.monotonic()
        self._lines: Counter[tuple[str, str]] = Counter()

    def __call__(self, kind: str, *, arm: str, **values: Any) -> None:
        clocks = values.pop("time", {})
        line = {"kind": kind, "arm": arm, **values, "time": {"elapsed_s": round(self.elapsed, 3), **clocks}}
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError as error:
            raise FloatingPointError(f"{kind} of arm {arm} has a number that is not finite: {values}") from error
        self._file.write(text + "\n")
        self._file.flush()
        self._digest.update(text.encode() + b"\n")
        means = {name: metric["mean"] for name, metric in values.get("metrics", {}).items()}
        numbers = {
            f"{arm}/{kind}/{name}": value
            for name, value in {**values, **means, **clocks}.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in PLACES
        }
        self._log_numbers(numbers, values.get("step", values.get("iteration", self._lines[arm, kind])))
        self._lines[arm, kind] += 1
        if self._watch is not None:
            self._watch(kind, {**values, **clocks})

    def close(self) -> None:
        self._file.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, without those between a process that was killed and the next."""
        return time.monotonic() - self._start

    @property
    def size(self) -> int:
        """Bytes that are safely on the disk now."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    @property
    def mark(self) -> dict[str, Any]:
        """The end of the file now, for ``cut``: "metrics_bytes", "metrics_checksum" of all before, and "phases", the
        seconds that no line has yet."""
        checksum = self._digest.hexdigest()
        return {"metrics_bytes": self.size, "metrics_checksum": checksum, "phases": self._pending()}

    def cut(self, mark: Mapping[str, Any]) -> None:
        """Cuts the file to where it ended at a ``mark``: what came later will be logged again.

        Raises UserError where what is before is not what was logged.
        """
        path, size = Path(self._file.name), mark["metrics_bytes"]
        kept = logged(path, mark)[:size]
        lines = parsed_lines(path, kept)
        self._digest = xxhash.xxh3_128(kept)
        self._file.truncate(size)
        self._lines = Counter((line["arm"], line["kind"]) for line in lines)
        self._start = time.monotonic() - max((line["time"]["elapsed_s"] for line in lines), default=0.0)


WIDTH = 80
"""Columns that a line takes at most, by a shorter name of its arm."""
SHORTEST_NAME = 6
WARM_UP_LINES = 10
"""Lines of a warm-up at most, where every line stays."""
SHOWN = {"reward": "reward", "kl": "KL", "entropy": "H", "response_length": "len"}
"""Statistics of a collection, and what a line calls them."""
_NAMES = {"greedy_accuracy": "greedy", "accuracy": "sampled", "distinct_4": "dist-4", "entropy": "H"}


class RunConsole:
    """Takes what a run logs, stage by stage, and prints a line of it; nothing is computed for that.

    On a terminal the latest line is replaced by the next, and only what ends a stage stays. A pipe and a log file get
    every line.

    sizes: the steps of the warm-up and the iterations of each arm, by stage in their order. clock: in seconds.
    """

    def __init__(self, sizes: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._sizes = dict(sizes)
        self._clock = clock
        self._line = StatusLine()
        self.stage = next(iter(sizes))
        self._reached: list[tuple[int, float]] = []
        """The steps, or iterations, that are done, and when: of this process in this stage."""
        self._arms_pace: float | None = None
        """Seconds for an iteration of an arm, as far as known."""
        self._evaluation_s = 0.0
        self._text = ""
        self._phases: Counter[str] = Counter()
        """Seconds of the stage."""
        self._all_phases: Counter[str] = Counter()
        """Seconds of the run, as far as this process has seen it."""

    def begin(self, stage: str) -> None:
        self.stage, self._reached, self._text = stage, [], ""

    def close(self) -> None:
        self._line.close()

    def __call__(self, kind: str, values: Mapping[str, Any]) -> None:
        """A line of the current stage's metrics, its clocks among the values."""
        total = self._sizes[self.stage]
        if kind == "sft_step":
            done = values["step"] + 1
            self._reached.append((done, self._clock()))
            stays = done == total or done % -(-total // WARM_UP_LINES) == 0
            if stays or self._line.is_due:
                self._show(done, total - done, f"loss {short(values['loss'])}", stays=stays)
        elif kind == "collection":  # an iteration's samples, on which the policy is going to be trained
            done = values["iteration"]
            self._reached.append((done, self._clock()))
            self._arms_pace = self._pace() or self._arms_pace
            measured = [f"{word} {short(values[name])}" for name, word in SHOWN.items() if name in values]
            self._show(done + 1, total - done, " ".join(measured), stays=True)
        elif kind == "evaluation":
            metrics = values["metrics"]
            shown = (name for name in main_metrics(list(metrics)) if name != POOLED)
            means = (f"{_NAMES.get(name, name)} {short(metrics[name]['mean'])}" for name in shown)
            if values["final"]:
                self._evaluation_s = values["evaluation_s"]
            when = f"after {values['iteration']}: " if total else ""
            print(self._with_place(f"{when}{' '.join(means)}"), flush=True)
        elif kind == "phases":
            seconds = {name: values[f"{name}_s"] for name in ("wall", *PHASES)}
            self._phases.update(seconds)
            self._all_phases.update(seconds)
            if values["report_s"]:
                print(time_line("run", self._all_phases), flush=True)
            elif "iteration" not in values:  # the end of a stage
                print(self._with_place(time_line("took", self._phases)), flush=True)
                self._phases.clear()
        elif self._text and self._line.is_due:
            self._line.show(self._text)

    def _show(self, number: int, left: int, measured: str, *, stays: bool) -> None:
        """left: the steps or iterations that are not done."""
        parts, pace = [f"{number}/{self._sizes[self.stage]}", measured], self._pace()
        if pace is not None:
            here, later = pace * left + self._evaluation_s, list(self._sizes)[self._place + 1 :]
            parts += [f"{short(pace)} s/it", f"left {clock_time(here)}"]
            if not later or self._arms_pace is not None:
                others = sum(self._sizes[name] * (self._arms_pace or 0.0) + self._evaluation_s for name in later)
                parts += [f"run ~{clock_time(here + others)}"]
        self._text = self._with_place(" ".join(parts))
        if not self._line.is_possible:
            if stays:
                print(self._text, flush=True)
        elif stays or self._line.is_due:
            self._line.show(self._text)

    def _pace(self) -> float | None:
        """Seconds for a step or an iteration, of those that this process has taken in this stage."""
        if len(self._reached) < 2:
            return None
        (first, begun), (last, now) = self._reached[0], self._reached[-1]
        return (now - begun) / (last - first)

    @property
    def _place(self) -> int:
        return list(self._sizes).index(self.stage)

    def _with_place(self, text: str) -> str:
        """The stage in front, its name cut where the line would be too wide for a terminal; of a run that trains
        nothing, which has one stage, nothing."""
        if not any(self._sizes.values()):
            return text
        place = f"[{self._place + 1}/{len(self._sizes)}]"
        room, name = max(WIDTH - len(place) - len(text) - 2, SHORTEST_NAME), self.stage
        if len(name) > room and self._line.is_possible:
            name = f"{name[: room - 1]}…"
        return f"{place} {name} {text}"


def time_line(name: str, seconds: Mapping[str, float]) -> str:
    """The wall time, and the share of each phase that has at least one percent of it, the largest first."""
    wall = seconds["wall"]
    shares = {phase: 100 * seconds[phase] / wall for phase in PHASES}
    named = sorted((one for one in shares.items() if one[1] >= 1), key=lambda one: -one[1])
    parts = (f"{phase.replace('_', ' ')} {share:.0f}%" for phase, share in named)
    return f"{name} {clock_time(wall)}: {', '.join(parts)}"


def short(number: float | None) -> str:
    """A number in few characters: 0, .64, 21, 1.8, 3e-05; - for None, which the log has for what is not finite."""
    if number is None:
        return "-"
    size = abs(number)
    if size >= 9.95 or number == 0:
        return f"{number:.0f}"
    text = f"{number:.1f}" if size >= 0.995 else f"{number:.2f}" if size >= 0.095 else f"{number:.1g}"
    return text.replace("0.", ".", 1) if size < 0.995 else text
