"""A study: tasks x arms x doses x seeds, each trained once, and one table of their results.

    name: development            # of the folder below output_dir
    results: docs/studies/development.csv
    seeds: [1, 2, 3]
    baselines: [grpo, entropy_bonus]
    tasks:
      sums: {config: study/sums}             # as for --config-name, with settings: [KEY=VALUE] if wanted
    arms:
      grpo: {}                               # conf/arm/grpo.yaml
      entropy_bonus: {dose: entropy_coefficient, doses: [0.01, 0.03, 0.1]}
      clip_higher: {arm: grpo, dose: clip_high, doses: [0.28, 0.4]}

A cell is what ``nemo-edo train`` runs with one arm at one dose and one seed. The cells of a task and a seed begin after
one warm-up, which is a run of its own, the start. A cell that the table has is finished, whether or not its folder is
still there.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from nemo_edo.config.compose import ConfigError
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START
from nemo_edo.experiments.gains import gains, markdown, verdict
from nemo_edo.experiments.grid import Cell, FailedCell, Grid, quoted, run_grid
from nemo_edo.experiments.study_table import append_rows, cell_of, cell_rows, config_digest, read_rows, stopped_row
from nemo_edo.run.folder import RunFolder
from nemo_edo.utils.wording import did_you_mean

FOLDER = "studies"
"""The folder of ``conf/`` with the studies that a bare name means."""
KEEP = ("nothing", "results", "everything")
NOT_FOR_REPORTS = ("checkpoints", "rollouts", "base", "logs", "report.html")
"""What ``keep: results`` removes from a cell's folder, in addition to the responses of its evaluations."""
STOPPED_BY_GUARD = 3
"""The exit status of a training that a guard stopped."""


@dataclass
class TaskEntry:
    """What ``--config-name`` and the command line of a task's runs are."""

    config: str
    settings: list[str] = field(default_factory=list)


@dataclass
class ArmEntry:
    """An arm, and the setting of it whose values are the doses."""

    arm: str = ""
    """Its name in ``conf/arm/``; the key by default."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its differences from that arm."""
    dose: str = ""
    doses: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StudyCell(Cell):
    """One training, or a start, whose arm is ``START``."""

    task: str
    arm: str
    dose: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.task, self.arm, self.dose, self.seed

    @property
    def warm_up(self) -> str:
        """Only settings of the arm tell the cells of a task and a seed apart."""
        return f"{self.task},seed={self.seed}"


@dataclass(frozen=True)
class Study(Grid):
    name: str
    tasks: dict[str, TaskEntry]
    arms: dict[str, ArmEntry]
    seeds: list[int]
    baselines: list[str] = field(default_factory=list)
    """The arms that the others are compared with, the plain method first."""
    results: str = ""
    """The CSV file with the results; by default ``output_dir/NAME.csv``."""
    output_dir: str = "runs"
    settings: list[str] = field(default_factory=list)
    """Overrides of every cell."""
    held_out: bool = False
    """Whether the arms that are no baselines claim better votes than the baselines (``experiments.gains``)."""
    keep: str = "results"
    """What is kept of a finished cell's folder: nothing; results, what ``nemo-edo report`` reads; everything."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def table(self) -> Path:
        return Path(self.results) if self.results else Path(self.output_dir) / f"{self.name}.csv"

    @property
    def cells(self) -> list[StudyCell]:
        """All trainings, seeds outermost: what is there after any time is as balanced as it can be."""
        return [
            self._arm_cell(task, arm, dose, seed)
            for seed in self.seeds
            for task in self.tasks
            for arm, entry in self.arms.items()
            for dose in entry.doses or [None]
        ]

    def start(self, task: str, seed: int) -> StudyCell:
        """The warm-up of a task and a seed, evaluated."""
        return self._cell(task, START, "", seed, ["algorithm=sft", "arms={}"])

    def _arm_cell(self, task: str, name: str, dose: float | None, seed: int) -> StudyCell:
        entry = self.arms[name]
        choice = entry.arm or name
        changes = {**entry.settings, **({} if dose is None else {entry.dose: dose})}
        settings = [f"arms.{choice}.{key}={_written(value)}" for key, value in changes.items()]
        return self._cell(task, name, "" if dose is None else f"{dose:g}", seed, [f"arms=[{choice}]", *settings])

    def _cell(self, task: str, arm: str, dose: str, seed: int, settings: list[str]) -> StudyCell:
        entry = self.tasks[task]
        name = f"{task},{arm}{f'={dose}' if dose else ''},seed={seed}"
        settings = [*self.settings, *entry.settings, *settings, f"seed={seed}", "replicate_baseline=false"]
        place = [f"name={quoted(name)}", f"output_dir={quoted(str(self.folder))}"]
        return StudyCell(
            name=name,
            config_name=entry.config,
            overrides=(*settings, *place),
            task=task,
            arm=arm,
            dose=dose,
            seed=seed,
        )

    def check(self) -> None:
        """Composes each task and each arm once. Raises ConfigError for what cannot be trained."""
        first = self.cells
        checked = [*{cell.task: cell for cell in first}.values()]
        checked += {(cell.arm, cell.dose): cell for cell in first if cell.task == first[0].task}.values()
        for cell in dict.fromkeys(checked):
            try:
                cfg = cell.cfg
            except ConfigError as error:
                raise ConfigError(f"{cell.name}: {error}") from error
            if len(cfg.arms) != 1 or not cfg.sft.steps:
                raise ConfigError(f"{cell.name}: a cell has one arm and a warm-up, and this one has {list(cfg.arms)} "
                                  f"and sft.steps={cfg.sft.steps}")  # fmt: skip

    # --- as a grid --------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[StudyCell]:
        """The trainings that the table does not have."""
        done = {cell_of(row) for row in read_rows(self.table)}
        return [cell for cell in self.cells if cell.key not in done]

    def left(self) -> list[Cell]:
        """``unfinished``, and before the first cell of a task and a seed the start, unless its run is finished."""
        found: dict[Cell, None] = {}
        for cell in self.unfinished():
            start = self.start(cell.task, cell.seed)
            if not self.run_folder(start).is_finished:
                found[start] = None
            found[cell] = None
        return list(found)

    def donors(self, cell: StudyCell) -> list[Cell]:
        return [self.start(cell.task, cell.seed)]

    def record(self, cell: StudyCell, status: int, cpu_seconds: float) -> bool:
        """Adds the cell's rows to the table and removes what is not kept of its folder. Of a training that a guard
        stopped, the row says why."""
        folder, is_start = self.run_folder(cell), cell.arm == START
        if status == STOPPED_BY_GUARD and not is_start:
            commit = _commit(self.run_folder(self.start(cell.task, cell.seed)))
            reason = re.findall(r"stopped by a guard: (.*)", self.log(cell).read_text(encoding="utf-8"))[-1]
            append_rows(self.table, [stopped_row(cell.key, cell.cfg, cpu_seconds, commit, reason)])
        elif status:
            return False
        elif cell.key not in {cell_of(row) for row in read_rows(self.table)}:  # a start may be run again
            append_rows(self.table, cell_rows(cell.key, cell.cfg, folder, cpu_seconds, _commit(folder)))
            if not is_start:
                _tidy(folder.path, self.keep)
        return True


def run_study(study: Study, *, jobs: int = 1, say: Callable[[str], None] = print) -> list[FailedCell]:
    """Runs the cells that are left, and returns those that failed. Raises as ``run_grid`` does, and ConfigError for a
    config that cannot be run, before the first cell begins."""
    study.check()
    left = len(study.unfinished())
    say(f"{len(study.cells) - left} of {len(study.cells)} cells are in {study.table}; {left} are left")
    return run_grid(study, jobs=jobs, say=say)


def _commit(folder: RunFolder) -> str:
    return folder.read_json("summary.json")["commit"] or ""


def _tidy(folder: Path, keep: str) -> None:
    """Removes what the study does not keep of a finished cell."""
    if keep == "nothing":
        shutil.rmtree(folder)
    elif keep == "results":
        responses = [path for path in (folder / "evaluations").glob("*/*") if path.is_dir()]
        for path in (*(folder / name for name in NOT_FOR_REPORTS), *responses):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


# --- how far it is ------------------------------------------------------------------------------------------------


def status_lines(study: Study) -> list[str]:
    left, hours = study.unfinished(), cpu_hours_left(study)
    lines = [f"{len(study.cells) - len(left)} of {len(study.cells)} cells are in {study.table}"]
    by_task = Counter(cell.task for cell in left)
    lines += [f"  {task}: {by_task[task]} left" for task in study.tasks]
    if left and hours is not None:
        lines.append(f"about {hours:.1f} CPU hours are left, by the cells that have finished")
    changed = [cell.name for cell in changed_cells(study)]
    if changed:
        lines.append(f"settings have changed since these were run: {', '.join(changed)}; remove their rows to run them "
                     "again")  # fmt: skip
    return [*lines, *verdict_lines(study)]


def changed_cells(study: Study) -> list[StudyCell]:
    """Finished cells whose settings have changed since. Composes each arm of a task once: seeds differ in no other
    setting."""
    digests = {cell_of(row): row["config"] for row in read_rows(study.table)}
    finished = {(cell.task, cell.arm, cell.dose): cell for cell in study.cells if cell.key in digests}
    return [cell for cell in finished.values() if config_digest(cell.cfg) != digests[cell.key]]


def cpu_hours_left(study: Study) -> float | None:
    """From the mean CPU seconds of the finished cells of each task, or of all where a task has none, with the warm-ups
    that are missing; None before the first cell."""
    seconds = {cell_of(row): float(row["cpu_seconds"]) for row in read_rows(study.table)}
    trained = {key: cost for key, cost in seconds.items() if key[1] != START}
    starts = {key: cost for key, cost in seconds.items() if key[1] == START}
    if not trained:
        return None
    left = study.unfinished()
    missing = {(cell.task, cell.seed) for cell in left} - {(task, seed) for task, _, _, seed in starts}
    total = sum(_mean_of(trained, cell.task) for cell in left)
    total += sum(_mean_of(starts or trained, task) for task, _ in missing)
    return total / 3600


def _mean_of(seconds: dict[tuple[str, str, str, int], float], task: str) -> float:
    return fmean([cost for key, cost in seconds.items() if key[0] == task] or seconds.values())


def verdict_lines(study: Study) -> list[str]:
    """The verdict on a held-out study's claim, with its table, once every cell is done; otherwise nothing."""
    if not study.held_out or study.unfinished():
        return []
    wanted = {cell.key for cell in study.cells}
    found = gains([row for row in read_rows(study.table) if cell_of(row) in wanted], study.baselines)
    return [verdict(found), markdown(found)]


# --- its file -----------------------------------------------------------------------------------------------------


def study_file(given: str) -> Path:
    """The file of a path, or of a name in ``conf/studies/``. Raises UserError where there is none."""
    shipped = shipped_config_dir() / FOLDER / f"{given}.yaml"
    for path in (Path(given), shipped):
        if path.is_file():
            return path
    names = [path.stem for path in sorted(shipped.parent.glob("*.yaml"))]
    raise UserError(f"no study {given}{did_you_mean(given, names)} (a path, or one of: {', '.join(names)})")


def read_study(path: Path) -> Study:
    """Raises UserError naming the file, the key, and what would be right."""
    try:
        study = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), OmegaConf.load(path)))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ConfigKeyError as error:
        known = [one.name for one in fields(error.object_type)]
        near = did_you_mean(str(error.key), known)
        raise UserError(f"{path}: unknown key {error.full_key}{near}") from error
    except OmegaConfBaseException as error:
        reason = str(error.msg).partition("\n")[0]
        raise UserError(f"{path}: {error.full_key or 'the file'}: {reason}") from error
    _check(study, path)
    return study


def _check(study: Study, path: Path) -> None:
    if not re.fullmatch(r"[\w.-]+", study.name):
        raise UserError(f"{path}: name is {study.name!r}, expected letters, digits, and . _ -")
    if study.keep not in KEEP:
        raise UserError(f"{path}: keep is {study.keep!r}, expected one of {', '.join(KEEP)}")
    for key in ("tasks", "arms", "seeds"):
        if not getattr(study, key):
            raise UserError(f"{path}: {key} is empty, expected at least one")
    if min(study.seeds) < 0 or len(set(study.seeds)) < len(study.seeds):
        raise UserError(f"{path}: seeds is {study.seeds}, expected different whole numbers of at least 0")
    for name in (*study.tasks, *study.arms):
        if not re.fullmatch(r"\w+", name) or name == START:
            raise UserError(f"{path}: {name!r} names no task or arm: expected letters, digits and _, and not {START}")
    for name in study.baselines:
        if name not in study.arms:
            raise UserError(f"{path}: baselines has {name!r}, which is no arm{did_you_mean(str(name), study.arms)}")
    if study.held_out and (not study.baselines or not set(study.arms) - set(study.baselines)):
        raise UserError(f"{path}: held_out is true, so that it needs baselines, and an arm that is none")
    for name, arm in study.arms.items():
        if study.held_out and len(arm.doses) > 1:
            raise UserError(f"{path}: arms.{name}.doses is {arm.doses}, expected one dose where held_out is true")
        numbers = {f"{dose:g}" for dose in arm.doses if isinstance(dose, int | float)}
        if len(numbers) < len(arm.doses):
            raise UserError(f"{path}: arms.{name}.doses is {arm.doses}, expected different numbers")
        if bool(arm.dose) != bool(arm.doses):
            raise UserError(f"{path}: arms.{name}: dose and doses: give both, the setting and its values, or neither")


def _written(value: Any) -> str:
    """A value in Hydra's syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_written, value)) + "]"
    return quoted(value) if isinstance(value, str) else repr(value)
