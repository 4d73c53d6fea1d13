"""A study's file: tasks x arms x doses x seeds, and the cells that they make.

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

A cell is what ``nemo-edo train`` runs with one arm at one dose and one seed; ``Cell.overrides`` are its settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from nemo_edo.config.compose import ConfigError, compose_run
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START
from nemo_edo.run.sweep import quoted
from nemo_edo.utils.wording import did_you_mean

FOLDER = "studies"
"""Of ``conf/``: the studies that a bare name means."""
KEEP = ("nothing", "results", "everything")


@dataclass(frozen=True)
class TaskEntry:
    """What ``--config-name`` and the command line of a task's runs are."""

    config: str
    settings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ArmEntry:
    """An arm, and the setting of it whose values are the doses."""

    arm: str = ""
    """Its name in ``conf/arm/``; the key by default."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its differences from that arm."""
    dose: str = ""
    doses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """One training: or the start that all arms of a task and a seed share, whose arm is ``START``."""

    task: str
    arm: str
    dose: str
    seed: int
    config: str
    overrides: tuple[str, ...]
    """All settings but the name and the folder of its run."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.task, self.arm, self.dose, self.seed

    @property
    def name(self) -> str:
        """Of its run's folder."""
        return f"{self.task},{self.arm}{f'={self.dose}' if self.dose else ''},seed={self.seed}"


@dataclass(frozen=True)
class Study:
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
    """Whether the arms that are no baselines claim better votes than the baselines (``report.gains``)."""
    keep: str = "results"
    """Of a finished cell's folder: nothing; results, what ``nemo-edo report`` reads; everything."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def table(self) -> Path:
        return Path(self.results) if self.results else Path(self.output_dir) / f"{self.name}.csv"

    def start(self, task: str, seed: int) -> Cell:
        """The warm-up of a task and a seed, evaluated."""
        entry = self.tasks[task]
        settings = [*self.settings, *entry.settings, "algorithm=sft", "arms={}", f"seed={seed}"]
        return Cell(task, START, "", seed, entry.config, (*settings, "replicate_baseline=false"))

    @property
    def cells(self) -> list[Cell]:
        """All trainings, seeds outermost: what is there after any time is as balanced as it can be."""
        return [
            self._cell(task, arm, dose, seed)
            for seed in self.seeds
            for task in self.tasks
            for arm, entry in self.arms.items()
            for dose in entry.doses or [None]
        ]

    def _cell(self, task: str, name: str, dose: float | None, seed: int) -> Cell:
        entry, arm = self.tasks[task], self.arms[name]
        changes = {**arm.settings, **({} if dose is None else {arm.dose: dose})}
        choice = arm.arm or name
        of_arm = [f"arms.{choice}.{key}={_written(value)}" for key, value in changes.items()]
        settings = [*self.settings, *entry.settings, f"arms=[{choice}]", *of_arm, f"seed={seed}"]
        shown = "" if dose is None else f"{dose:g}"
        return Cell(task, name, shown, seed, entry.config, (*settings, "replicate_baseline=false"))

    def check(self) -> None:
        """Composes each task and each arm once. Raises ConfigError for what could not be trained."""
        first = self.cells
        checked = [*{cell.task: cell for cell in first}.values()]
        checked += {(cell.arm, cell.dose): cell for cell in first if cell.task == first[0].task}.values()
        for cell in dict.fromkeys(checked):
            try:
                cfg = compose_run(cell.config, list(cell.overrides))
            except ConfigError as error:
                raise ConfigError(f"{cell.name}: {error}") from error
            if len(cfg.arms) != 1 or not cfg.sft.steps:
                raise ConfigError(f"{cell.name}: a cell has one arm and a warm-up, and this one has {list(cfg.arms)} "
                                  f"and sft.steps={cfg.sft.steps}")  # fmt: skip


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
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    study = _record(Study, values, path, "")
    tasks = {name: _record(TaskEntry, entry, path, f"tasks.{name}.") for name, entry in study.tasks.items()}
    arms = {name: _record(ArmEntry, entry, path, f"arms.{name}.") for name, entry in study.arms.items()}
    study = Study(**{**{one.name: getattr(study, one.name) for one in fields(study)}, "tasks": tasks, "arms": arms})
    _check(study, path)
    return study


def _record(schema: type, values: Any, path: Path, prefix: str) -> Any:
    """The dataclass of a mapping's values, of the types that its fields say."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: {prefix.rstrip('.') or 'the file'} is {values!r}, expected a mapping")
    known = {one.name: one for one in fields(schema)}
    for key in values:
        if key not in known:
            raise UserError(f"{path}: unknown key {prefix}{key}{did_you_mean(str(key), known)}")
    for name, one in known.items():
        if name not in values and one.default is MISSING and one.default_factory is MISSING:
            raise UserError(f"{path}: {prefix}{name} is missing")
    for key, value in values.items():
        expected = {"s": str, "l": list, "d": dict, "b": bool}[str(known[key].type)[0]]
        if not isinstance(value, expected):
            words = {str: "a text", list: "a list", dict: "a mapping", bool: "true or false"}[expected]
            raise UserError(f"{path}: {prefix}{key} is {value!r}, expected {words}")
    return schema(**values)


def _check(study: Study, path: Path) -> None:
    if not re.fullmatch(r"[\w.-]+", study.name):
        raise UserError(f"{path}: name is {study.name!r}, expected letters, digits, and . _ -")
    if study.keep not in KEEP:
        raise UserError(f"{path}: keep is {study.keep!r}, expected one of {', '.join(KEEP)}")
    for key in ("tasks", "arms", "seeds"):
        if not getattr(study, key):
            raise UserError(f"{path}: {key} is empty, expected at least one")
    whole = [isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in study.seeds]
    if not all(whole) or len(set(study.seeds)) < len(study.seeds):
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
        _check_doses(arm, f"{path}: arms.{name}")


def _check_doses(arm: ArmEntry, place: str) -> None:
    numbers = [isinstance(dose, int | float) and not isinstance(dose, bool) for dose in arm.doses]
    if not all(numbers) or len({f"{dose:g}" for dose in arm.doses}) < len(arm.doses):
        raise UserError(f"{place}.doses is {arm.doses}, expected different numbers (1e-3 needs its point: 1.0e-3)")
    if bool(arm.dose) != bool(arm.doses):
        raise UserError(f"{place}: dose and doses: give both, the setting and its values, or neither")


def _written(value: Any) -> str:
    """A value in Hydra's syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_written, value)) + "]"
    return quoted(value) if isinstance(value, str) else repr(value)
