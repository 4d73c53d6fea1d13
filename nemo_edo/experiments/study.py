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

A cell is what ``nemo-edo train`` runs with one arm at one dose and one seed. The cells of a task and a seed adopt one
warm-up, which a separate run trains, the start; seeds can share it (``warm_up_seeds``). A cell that the table has is
finished, whether or not its folder is still there.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle, product
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from nemo_edo.config.compose import ConfigError
from nemo_edo.config.hydra import quoted
from nemo_edo.config.run import START
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.experiments import study_table
from nemo_edo.experiments.grid import Cell, FailedCell, Grid, run_grid
from nemo_edo.run_folder import SUMMARY, RunFolder
from nemo_edo.utils.files import read_object
from nemo_edo.utils.wording import did_you_mean

KEEP = ("nothing", "results", "everything")
NOT_FOR_REPORTS = ("checkpoints", "rollouts", "base", "logs", "report.html")
"""What ``keep: results`` removes from a cell's folder, in addition to the responses of its evaluations."""
STOPPED_BY_GUARD = 3
"""The exit status of a training that a guard stopped."""


@dataclass
class TaskEntry:
    """A task's config, as for ``--config-name``, and overrides of it."""

    config: str
    settings: list[str] = field(default_factory=list)


@dataclass
class ArmEntry:
    """An arm, and the setting of it whose values are the doses."""

    arm: str = ""
    """The arm's name in ``conf/arm/``; the key by default."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Differences from that arm."""
    dose: str = ""
    doses: list[Any] = field(default_factory=list)
    first_seeds: int = 0
    """How many of the study's seeds it is trained with, the first ones; 0: all."""


@dataclass(frozen=True, kw_only=True)
class StudyCell(Cell):
    """One training, or a start, whose arm is ``START``."""

    task: str
    arm: str
    dose: str
    seed: int
    warm_up_seed: int

    @property
    def key(self) -> study_table.CellKey:
        return self.task, self.arm, self.dose, self.seed

    @property
    def warm_up(self) -> str:
        """Only settings of the arm tell the cells of a task and a warm-up apart."""
        return f"{self.task},seed={self.warm_up_seed}"


@dataclass(frozen=True)
class Study(Grid):
    name: str
    tasks: dict[str, TaskEntry]
    arms: dict[str, ArmEntry]
    seeds: list[int]
    warm_up_seeds: list[int] = field(default_factory=list)
    """The seeds of the warm-ups, which the cells' seeds take in turn; empty: each seed has a separate warm-up."""
    baselines: list[str] = field(default_factory=list)
    """The arms that the others are compared with, the plain method first."""
    results: str = ""
    """The CSV file with the results; by default ``output_dir/NAME.csv``."""
    output_dir: str = "runs"
    settings: list[str] = field(default_factory=list)
    """Overrides of every cell."""
    held_out: bool = False
    """Whether the arms that are not baselines claim better votes than the baselines (``verdict.gains``)."""
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
        """All trainings, seeds outermost: whenever a study is stopped, its table is as balanced as it can be."""
        found = []
        warm_up_seeds = cycle(self.warm_up_seeds) if self.warm_up_seeds else self.seeds
        seeds = enumerate(zip(self.seeds, warm_up_seeds, strict=False))
        for (place, seeds_of_cell), task, (name, entry) in product(seeds, self.tasks, self.arms.items()):
            if entry.first_seeds and place >= entry.first_seeds:
                continue
            choice = entry.arm or name
            for dose in entry.doses or [None]:
                changes = entry.settings if dose is None else {**entry.settings, entry.dose: dose}
                settings = [f"arms.{choice}.{key}={_written(value)}" for key, value in changes.items()]
                text = "" if dose is None else f"{dose:g}"
                found.append(self._cell(task, name, text, seeds_of_cell, [f"arms=[{choice}]", *settings]))
        return found

    def start(self, task: str, seed: int) -> StudyCell:
        """The warm-up of a task with that seed, evaluated."""
        return self._cell(task, START, "", (seed, seed), ["algorithm=sft", "arms={}"])

    def _cell(self, task: str, arm: str, dose: str, seeds: tuple[int, int], settings: list[str]) -> StudyCell:
        """seeds: the training's and the warm-up's."""
        entry, (seed, warm_up_seed) = self.tasks[task], seeds
        if seed != warm_up_seed:
            settings = [*settings, f"train.seed={seed}"]
        name = f"{task},{arm}{f'={dose}' if dose else ''},seed={seed}"
        place = (f"name={quoted(name)}", f"output_dir={quoted(str(self.folder))}")
        shared = (f"seed={warm_up_seed}", "replicate_baseline=false")
        overrides = (*self.settings, *entry.settings, *settings, *shared, *place)
        names = {"task": task, "arm": arm, "dose": dose, "seed": seed, "warm_up_seed": warm_up_seed}
        return StudyCell(name=name, config_name=entry.config, overrides=overrides, **names)

    def check(self) -> None:
        """Composes each task and each arm once. Raises ConfigError for what cannot be trained."""
        cells = self.cells
        by_arm = {(cell.arm, cell.dose): cell for cell in cells if cell.task == cells[0].task}
        for cell in dict.fromkeys([*{cell.task: cell for cell in cells}.values(), *by_arm.values()]):
            try:
                cfg = cell.cfg
            except ConfigError as error:
                raise ConfigError(f"{cell.name}: {error}") from error
            if self.held_out and not cfg.evaluation.tuning_problems:
                raise ConfigError(
                    f"{cell.name}: held_out is true, and policies are compared at the temperature that is best on "
                    "training problems: set evaluation.tuning_problems"
                )
            if len(cfg.arms) != 1 or not cfg.sft.steps:
                has = f"this one has {list(cfg.arms)} and sft.steps={cfg.sft.steps}"
                raise ConfigError(f"{cell.name}: a cell has one arm and a warm-up, and {has}")

    def unfinished(self) -> list[StudyCell]:
        """The trainings that the table does not have."""
        recorded = self._recorded()
        return [cell for cell in self.cells if cell.key not in recorded]

    def _recorded(self) -> set[study_table.CellKey]:
        return {study_table.cell_of(row) for row in study_table.read_rows(self.table)}

    def left(self) -> list[Cell]:
        """``unfinished``, and before the first cell of a warm-up the start, unless its run is finished."""
        found: dict[Cell, None] = {}
        for cell in self.unfinished():
            start = self.start(cell.task, cell.warm_up_seed)
            found |= dict.fromkeys([cell] if self.run_folder(start).is_finished else [start, cell])
        return list(found)

    def donors(self, cell: StudyCell) -> list[Cell]:
        return [self.start(cell.task, cell.warm_up_seed)]

    def record(self, cell: StudyCell, status: int, cpu_seconds: float) -> bool:
        """Adds the cell's rows to the table and removes what is not kept of its folder. The row of a training that a
        guard stopped says why."""
        folder, is_start = self.run_folder(cell), cell.arm == START
        if status == STOPPED_BY_GUARD and not is_start:
            [*_, reason] = re.findall(r"stopped by a guard: (.*)", self.log(cell).read_text(encoding="utf-8"))
            start = self.run_folder(self.start(cell.task, cell.warm_up_seed))  # which a guard may have stopped, too
            commit = _commit(start) if start.is_finished else ""
            row = study_table.stopped_row(cell.key, cell.cfg, cpu_seconds, commit, reason)
            study_table.append_rows(self.table, [row])
        elif status:
            return False
        elif cell.key not in self._recorded():  # a start may be run again
            rows = study_table.cell_rows(cell.key, cell.cfg, folder, cpu_seconds, _commit(folder))
            study_table.append_rows(self.table, rows)
            if self.keep == "nothing" and not is_start:
                shutil.rmtree(folder.path)
            elif self.keep == "results" and not is_start:
                responses = [path for path in (folder.path / "evaluations").glob("*/*") if path.is_dir()]
                for path in (*(folder.path / name for name in NOT_FOR_REPORTS), *responses):
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
        return True


def _commit(folder: RunFolder) -> str:
    return read_object(folder.path / SUMMARY, ())["commit"] or ""


def run_study(study: Study, *, jobs: int = 1) -> list[FailedCell]:
    """Trains the cells that are left, and returns those that failed. Raises as ``run_grid`` and ``Study.check`` do,
    the latter before the first cell begins."""
    study.check()
    print(f"{_progress(study)}; {len(study.unfinished())} are left", flush=True)
    return run_grid(study, jobs=jobs)


def _progress(study: Study) -> str:
    return f"{len(study.cells) - len(study.unfinished())} of {len(study.cells)} cells are in {study.table}"


def status_lines(study: Study) -> list[str]:
    left, hours = Counter(cell.task for cell in study.unfinished()), cpu_hours_left(study)
    lines = [_progress(study), *(f"  {task}: {left[task]} left" for task in study.tasks)]
    if left and hours is not None:
        lines.append(f"about {hours:.1f} CPU hours are left, by the cells that have finished")
    if changed := ", ".join(cell.name for cell in changed_cells(study)):
        again = f"to run them again, remove their rows, and their folders in {study.folder}"
        lines.append(f"settings have changed since these were run: {changed}; {again}")
    return [*lines, *verdict_lines(study)]


def changed_cells(study: Study) -> list[StudyCell]:
    """Finished starts and cells whose settings have changed since, one for each arm and dose of a task: seeds differ in
    no other setting."""
    digests = {study_table.cell_of(row): row["config"] for row in study_table.read_rows(study.table)}
    cells = [*(study.start(cell.task, cell.warm_up_seed) for cell in study.cells), *study.cells]
    finished = {(cell.task, cell.arm, cell.dose): cell for cell in cells if cell.key in digests}
    return [cell for cell in finished.values() if study_table.config_digest(cell.cfg) != digests[cell.key]]


def cpu_hours_left(study: Study) -> float | None:
    """An estimate from the mean CPU seconds of the finished cells of each task, or of all where a task has none, with
    the warm-ups that are missing; None before the first cell."""
    rows = study_table.read_rows(study.table)
    seconds = {study_table.cell_of(row): float(row["cpu_seconds"]) for row in rows if float(row["cpu_seconds"])}
    trained = {key: cost for key, cost in seconds.items() if key[1] != START}
    starts = {key: cost for key, cost in seconds.items() if key[1] == START}
    if not trained:
        return None

    def mean(costs: Mapping[study_table.CellKey, float], task: str) -> float:
        return fmean([cost for key, cost in costs.items() if key[0] == task] or costs.values())

    left = study.unfinished()
    missing = {(cell.task, cell.warm_up_seed) for cell in left} - {(task, seed) for task, _, _, seed in starts}
    total = sum(mean(trained, cell.task) for cell in left)
    return (total + sum(mean(starts or trained, task) for task, _ in missing)) / 3600


def verdict_lines(study: Study) -> list[str]:
    """The verdict on a held-out study's claim, with its table, once every cell is done; otherwise nothing."""
    if not study.held_out or study.unfinished():
        return []
    from nemo_edo.experiments.verdict import gains, markdown, verdict  # loads pandas

    wanted = {cell.key for cell in study.cells}
    rows = [row for row in study_table.read_rows(study.table) if study_table.cell_of(row) in wanted]
    try:
        found = gains(rows, study.baselines)
    except ValueError as error:
        return [f"no verdict: {error}"]
    return [verdict(found), markdown(found)]


def study_file(given: str) -> Path:
    """The file of a path, or of a name in ``conf/studies/``. Raises UserError where there is none."""
    shipped = shipped_config_dir() / "studies"
    for path in (Path(given), shipped / f"{given}.yaml"):
        if path.is_file():
            return path
    names = [path.stem for path in sorted(shipped.glob("*.yaml"))]
    raise UserError(f"no study {given}{did_you_mean(given, names)} (a path, or one of: {', '.join(names)})")


def read_study(path: Path) -> Study:
    """Raises UserError naming the file, the key, and what would be right."""
    try:
        study = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), OmegaConf.load(path)))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ConfigKeyError as error:
        near = did_you_mean(str(error.key), [one.name for one in fields(error.object_type)])
        raise UserError(f"{path}: unknown key {error.full_key}{near}") from error
    except OmegaConfBaseException as error:
        reason = str(error.msg).partition("\n")[0]
        raise UserError(f"{path}: {error.full_key or 'the file'}: {reason}") from error
    if wrong := next(_mistakes(study), None):
        raise UserError(f"{path}: {wrong}")
    return study


def _mistakes(study: Study) -> Iterator[str]:
    if not re.fullmatch(r"[\w.-]+", study.name):
        yield f"name is {study.name!r}, expected letters, digits, and . _ -"
    if study.keep not in KEEP:
        yield f"keep is {study.keep!r}, expected one of {', '.join(KEEP)}"
    yield from (f"{key} is empty, expected at least one" for key in ("tasks", "arms", "seeds") if not vars(study)[key])
    for key, seeds in {"seeds": study.seeds, "warm_up_seeds": study.warm_up_seeds}.items():
        if min(seeds, default=0) < 0 or len(set(seeds)) < len(seeds):
            yield f"{key} is {seeds}, expected different whole numbers of at least 0"
    for name in (*study.tasks, *study.arms):
        if not re.fullmatch(r"\w+", name) or name == START:
            yield f"{name!r} names no task or arm: expected letters, digits and _, and not {START}"
    for name in set(study.baselines) - set(study.arms):
        yield f"baselines has {name!r}, which is no arm{did_you_mean(str(name), study.arms)}"
    if study.held_out and (not study.baselines or not set(study.arms) - set(study.baselines)):
        yield "held_out is true, so that it needs baselines, and an arm that is none"
    if study.held_out and len(study.seeds) < 2:
        yield f"seeds is {study.seeds}, expected at least two where held_out is true"
    for name, arm in study.arms.items():
        if not 0 <= arm.first_seeds <= len(study.seeds):
            yield f"arms.{name}.first_seeds is {arm.first_seeds}, expected at most the {len(study.seeds)} of seeds"
        if study.held_out and 0 < arm.first_seeds < len(study.seeds):
            yield f"arms.{name}.first_seeds is {arm.first_seeds}, expected all seeds where held_out is true"
        if study.held_out and len(arm.doses) > 1:
            yield f"arms.{name}.doses is {arm.doses}, expected one dose where held_out is true"
        if len({f"{dose:g}" for dose in arm.doses if isinstance(dose, int | float)}) < len(arm.doses):
            yield f"arms.{name}.doses is {arm.doses}, expected different numbers"
        if bool(arm.dose) != bool(arm.doses):
            yield f"arms.{name}: dose and doses: give both, the setting and its values, or neither"


def _written(value: Any) -> str:
    """A value in Hydra's syntax."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_written, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)
