"""Runs from Python or a notebook: ``import nemo_edo as edo``, then ``edo.train``, ``edo.load`` and ``edo.sweep``.

A training runs in a separate process, as on the command line: Megatron changes a process permanently, and a notebook's
kernel keeps its memory and its warnings. The run's output appears as it comes. A run's folder holds all there is to
know about it, so ``Run`` reads it anew each time, also while the run is in progress elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import Container, OmegaConf

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import arm_configs, compose_run
from nemo_edo.config.run import training_seed
from nemo_edo.errors import RunStopped, StoppedByGuard, UserError
from nemo_edo.evaluation.results import main_metrics, paired_interval, require_same_problems
from nemo_edo.experiments.grid import train_command
from nemo_edo.experiments.sweep import plan_sweep, run_sweep
from nemo_edo.report.run_folders import SWEEP, sweep_members
from nemo_edo.run.control import OUTCOME, VARIABLE, status_of
from nemo_edo.run.stored_run import open_run
from nemo_edo.run_folder import CONFIG, METRICS
from nemo_edo.utils.processes import end_with
from nemo_edo.utils.wording import did_you_mean

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

KINDS = ("collection", "evaluation", "train_step", "sft_step")
"""Kinds of lines of metrics.jsonl, in the order in which ``plot`` looks for a measurement."""
LAST_LINES = 100
"""The number of lines that a failed run has printed, in the error."""


def train(
    config_name: str = "quickstart",
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    processes: int = 1,
) -> Run:
    """Trains a config, as ``nemo-edo train`` does, and returns the finished run.

    overrides: ``["seed=2", "grpo.iterations=5"]``. config_dir: the config's folder; None: the package's configs.
    processes: of torchrun. The same call resumes a run that was stopped.

    Raises UserError for a wrong setting, before anything is started, and for input that cannot be used; StoppedByGuard
    where a guard stopped the run; RunStopped where the kernel was interrupted (the run has saved its state then); and
    RuntimeError, with its last lines, for any other end.
    """
    given = [overrides] if isinstance(overrides, str) else list(overrides)
    folder = str(Path(config_dir).resolve()) if config_dir else None
    cfg = compose_run(config_name, given, folder)
    status, last = _run(train_command(config_name, given, folder, processes))
    said = "\n".join(last)

    def message(after: str) -> str:
        """The run's last one. Behind it torchrun says what it thinks of its processes."""
        return re.split(r"\n(?=[EW]\d{4} |Traceback )", said.rpartition(after)[2])[0]

    if status == 2:
        raise UserError(message("nemo-edo: error: "))
    if status == 3:
        raise StoppedByGuard(said)
    if status == os.EX_TEMPFAIL:
        raise RunStopped(message("nemo-edo: "))
    if status:
        raise RuntimeError(f"the run ended with status {status}; its last lines:\n{said}")
    return Run(Path(cfg.output_dir) / cfg.name)


def load(path: str | Path) -> Run | Sweep:
    """A run, or a sweep, by its folder, finished or not. Raises UserError where there is none."""
    return Sweep(Path(path)) if (Path(path) / SWEEP).is_file() else Run(Path(path))


def sweep(
    config_name: str,
    overrides: Sequence[str],
    *,
    config_dir: str | Path | None = None,
    jobs: int = 1,
    processes: int = 1,
) -> list[Run]:
    """One run for each combination of the values that overrides list (``["grpo.alpha=0,1e-3", "seed=1,2"]``), ``jobs``
    at a time, as ``nemo-edo train -m`` does; finished members are not trained again. Returns their runs in order.

    Raises UserError as ``train`` does, and RuntimeError, which names their logs, where members failed, or where
    another command is training some.
    """
    planned = plan_sweep(config_name, list(overrides), str(Path(config_dir).resolve()) if config_dir else None)
    failures = run_sweep(planned, jobs=jobs, processes=processes)
    if failures:
        named = "; ".join(f"{one.cell.name}: status {one.status}, see {one.log}" for one in failures)
        raise RuntimeError(f"{len(failures)} of {len(planned.cells)} runs failed: {named}")
    if left := planned.left():
        named = ", ".join(cell.name for cell in left)
        raise RuntimeError(f"{len(left)} of {len(planned.cells)} runs are in training by another command: {named}")
    return [Run(planned.folder / cell.name) for cell in planned.cells]


class Run:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where the folder is not a run's."""
        self._stored = open_run(folder)
        self.folder = folder

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.name}, arms: {', '.join(self.arms) or 'none'})"

    @property
    def name(self) -> str:
        """The run's name, the last part of its folder's."""
        return self.config.name

    @property
    def config(self) -> RunConfig:
        """Every setting, resolved."""
        return self._stored.cfg

    @property
    def arms(self) -> list[str]:
        """Names of the trained policies, without the start that they share."""
        return self._stored.policies[1:]

    @property
    def report(self) -> Path:
        """The report's path; a finished run has one."""
        return self.folder / "report.html"

    @property
    def metrics(self) -> pd.DataFrame:
        """Everything that was logged, a row for each line of metrics.jsonl: ``kind`` (sft_step, collection, train_step,
        evaluation), ``arm``, ``iteration``, ``step``, and a column for each measurement (docs/metrics.md). Of an
        evaluation, METRIC is the mean, METRIC_low and METRIC_high bound its 95 % interval over problems."""
        import pandas as pd

        rows = []
        for line in self._stored.folder.lines() if (self.folder / METRICS).is_file() else ():
            row = {key: value for key, value in line.items() if key not in ("metrics", "time")}
            for name, one in line.get("metrics", {}).items():
                row |= {name: one["mean"], f"{name}_low": one["low"], f"{name}_high": one["high"]}
            rows.append(row | line.get("time", {}))
        return pd.DataFrame(rows)

    @property
    def rollouts(self) -> pd.DataFrame:
        """The responses of every arm's iterations in order, sorted by problem and sample: their question, text, tokens,
        log-probabilities, answer, reward and the reason for it. Of a run that trains nothing: ``responses``."""
        if not self.arms:
            return self.responses
        folders = {arm: self._stored.folder.rollouts(arm) for arm in self.arms}
        return self._responses("train", [(folder, {"arm": arm}) for arm, folder in folders.items()])

    @property
    def responses(self) -> pd.DataFrame:
        """The responses of the evaluations, as ``rollouts`` has those of the training: ``kind`` is greedy or sampled,
        with its temperature where there are several."""
        found = []
        for arm in self._stored.policies:
            of_arm = self._stored.folder.evaluation(arm).with_suffix("")
            folders = [path for path in sorted(of_arm.glob("*")) if path.is_dir()]
            found += [(path, {"arm": arm, "kind": path.name}) for path in folders if not path.name.startswith("tuning")]
        return self._responses("test", found)

    def _responses(self, split: str, folders: Sequence[tuple[Path, Mapping[str, str]]]) -> pd.DataFrame:
        import pandas as pd

        questions, parts = self._stored.questions(split), []
        for folder, about in folders:
            for path in sorted(folder.glob("iter_*/rank_*.parquet")):
                part = pd.read_parquet(path).sort_values(["problem_id", "sample_index"])
                columns = {**about, "iteration": int(path.parent.name.removeprefix("iter_"))}
                columns["question"] = part["problem_id"].map(questions)
                parts.append(pd.concat([pd.DataFrame(columns, index=part.index), part], axis=1))
        if not parts:
            return pd.DataFrame(columns=["arm", "iteration", "question", "problem_id"])
        return pd.concat(parts, ignore_index=True)

    @property
    def results(self) -> pd.DataFrame:
        """The final evaluations: a row for each policy (warmup is the start of all arms), a column for each metric."""
        import pandas as pd

        found = self._stored.folder.evaluations(self._stored.policies)
        means = {arm: {name: one.mean(name) for name in one.metrics if one.has(name)} for arm, one in found.items()}
        return pd.DataFrame.from_dict(means, orient="index")

    def compare(self, other: Run | None = None) -> pd.DataFrame:
        """Main metrics of the final evaluations, and their differences with 95 % intervals, paired by problem.

        With another run: each policy of that name there minus here. Without: each arm minus the first. The intervals
        cover the choice of test problems, not the noise of training: a claim about an arm needs several seeds
        (``nemo-edo report``). Raises UserError where they were evaluated on different problems.
        """
        import pandas as pd

        here, there = (run._stored.folder.evaluations(run._stored.policies) for run in (self, other or self))
        pairs = [(name, name) for name in here] if other else [(self.arms[0], name) for name in self.arms[1:]]
        pairs = [(one, two) for one, two in pairs if one in here and two in there]
        rows, random = [], {"resamples": self.config.evaluation.bootstrap, "seed": self.config.seed}
        for one, two in pairs:
            a, b = here[one], there[two]
            require_same_problems({"here": a, "there": b})
            for metric in main_metrics([name for name in a.metrics if a.has(name) and b.has(name)]):
                interval, _ = paired_interval(metric, b.metrics[metric], a.metrics[metric], **random)
                rows.append((two, metric, a.mean(metric), b.mean(metric), *vars(interval).values()))
        return pd.DataFrame(rows, columns=["arm", "metric", "here", "there", "difference", "low", "high"])

    def plot(self, metric: str = "reward", kind: str | None = None, arms: Sequence[str] | None = None) -> go.Figure:
        """A measurement over the training, a line for each arm. kind: of the lines that have it; None: the first of
        ``KINDS`` that does, or another. Raises UserError for a measurement that was not logged."""
        import plotly.graph_objects as go

        from nemo_edo.report.plotting import COLORS

        frame = self.metrics
        if metric not in frame or frame[metric].isna().all():
            raise UserError(f"{self.folder / METRICS} has no {metric!r}{did_you_mean(metric, frame.columns)}")
        frame = frame[frame[metric].notna()]
        kinds = frame["kind"].unique()
        kind = kind or next((one for one in KINDS if one in kinds), kinds[0])
        axis = "step" if kind.endswith("_step") else "iteration"
        titles = {"title": f"{self.name}: {metric} ({kind})", "xaxis_title": axis, "yaxis_title": metric}
        figure = go.Figure(layout=titles)
        frame = frame[frame["kind"] == kind]
        for place, arm in enumerate(arms or frame["arm"].unique()):
            line = frame[frame["arm"] == arm]
            color = {"color": COLORS[place % len(COLORS)]}
            figure.add_scatter(x=line.get(axis), y=line[metric], name=arm, mode="lines+markers", line=color)
        return figure


class Sweep:
    """A sweep's folder: its runs that have begun, and their tables one above the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        members = sweep_members(folder)
        same = set.intersection(*map(set, members.values())) if members else set()
        swept = {name: [one for one in overrides if one not in same and not one.startswith("name=")]
                 for name, overrides in members.items()}  # fmt: skip
        self._swept = {name: [one.partition("=")[0].lstrip("+") for one in own] for name, own in swept.items()}
        self.runs = [Run(folder / name) for name in self._swept if (folder / name / CONFIG).is_file()]

    def __repr__(self) -> str:
        return f"Sweep({str(self.folder)!r}, {len(self.runs)} of {len(self._swept)} runs have begun)"

    @property
    def results(self) -> pd.DataFrame:
        """The final evaluations: a row for each run and policy; columns ``run``, ``arm``, ``seed``, ``alpha`` (of the
        arm), what the sweep varies by its key, such as ``grpo.alpha``, and the metrics."""
        return self._together(lambda run: run.results.rename_axis("arm").reset_index())

    @property
    def metrics(self) -> pd.DataFrame:
        """``Run.metrics`` of every run, with the columns of ``results`` that say which it is."""
        return self._together(lambda run: run.metrics)

    def _together(self, table: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
        import pandas as pd

        parts = []
        for run in self.runs:
            part, cfg, arms = table(run), run.config, arm_configs(run.config)
            alphas = {name: settings.effective_alpha for name, settings in arms.items()}
            settings = OmegaConf.structured(cfg)
            found = {key: OmegaConf.select(settings, key) for key in self._swept[run.folder.name]}
            swept = {key: str(one) if isinstance(one, Container) else one for key, one in found.items()}
            about = {"run": run.folder.name, "seed": training_seed(cfg), **swept}
            if len(part):
                about = pd.DataFrame({"arm": part["arm"], "alpha": part["arm"].map(alphas), **about}, index=part.index)
                parts.append(pd.concat([about, part.drop(columns=part.columns.intersection(about.columns))], axis=1))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["run", "arm", "seed", "alpha"])


def _run(command: list[str]) -> tuple[int, list[str]]:
    """Runs a command, shows what it prints, and returns its status and its last lines. An interrupt is handed on: the
    command saves its state and ends."""
    kernel, last = os.getpid(), deque(maxlen=LAST_LINES)
    told = Path(tempfile.mkdtemp(prefix="nemo_edo_"), OUTCOME)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", VARIABLE: str(told.parent)},
        start_new_session=True,  # an interrupt of the kernel reaches it once, from here
        preexec_fn=lambda: end_with(kernel),
    ) as process:
        while True:
            try:
                for line in process.stdout:
                    sys.stdout.write(line)
                    last.append(line.rstrip())
                status = process.wait()
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
    if told.is_file():
        if status == 1:  # torchrun has 1 for whatever status its processes have
            status = status_of(told.read_text(encoding="utf-8"))
        told.unlink()
    with contextlib.suppress(OSError):  # the stacks of a run that stalled stay there
        told.parent.rmdir()
    return status, list(last) or [""]
