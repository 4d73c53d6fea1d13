"""A sweep: one run for each combination of the values that overrides list.

The same command resumes a stopped sweep: finished runs are left alone, the others resume.
"""

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Override, Transformer, ValueType

from nemo_edo.config.compose import ConfigError, compose_run, text_settings
from nemo_edo.config.hydra import bad_override, parse_overrides, quoted
from nemo_edo.errors import UserError
from nemo_edo.experiments.grid import Cell, FailedCell, Grid, hold, run_grid
from nemo_edo.report.run_folders import sweep_members
from nemo_edo.run_folder import CONFIG
from nemo_edo.utils.files import check_folder, write_text

LONGEST_NAME = 120
"""Bytes of a run's name: file systems take 255, and a run's own files come on top in some of them."""


@dataclass(frozen=True)
class SweepGrid(Grid):
    """Runs that have all been composed and checked."""

    config_name: str
    folder: Path
    """``output_dir/name`` of the config."""
    cells: tuple[Cell, ...]


def plan_sweep(
    config_name: str, overrides: Sequence[str], config_dir: str | None = None, *, absolute: bool = False
) -> SweepGrid:
    """The runs of a sweep: every combination of the values that overrides list, in Hydra's sweep syntax.

    ``KEY=A,B``, ``KEY=choice(A,B)`` and ``KEY=range(START,STOP,STEP)``; the last key varies fastest. absolute: whether
    the runs' output_dir is an absolute path, for those that start in another folder. Raises
    ``ConfigError`` where nothing is swept or any run's config is wrong, and ``UserError`` where a run's folder
    belongs to another run: before the first one starts.
    """
    parsed = parse_overrides(overrides, text_settings())
    combinations = list(product(*map(_choices, parsed)))
    swept = [place for place, override in enumerate(parsed) if override.is_sweep_override()]
    if not swept:
        raise ConfigError("nothing is swept: give a setting several values, as in seed=1,2,3")
    given = Counter(override.key_or_group for override in parsed)
    for override in (parsed[place] for place in swept):
        if given[override.key_or_group] > 1:
            raise bad_override(override, f"{override.key_or_group} is given twice; give it once")
    first = compose_run(config_name, list(combinations[0]), config_dir)
    output_dir = Path(first.output_dir)
    folder = (output_dir.resolve() if absolute else output_dir) / first.name
    if (folder / CONFIG).is_file():
        raise UserError(f"{folder} is the folder of a single run; choose another name=... for the sweep")
    names, cells = _names([[one[place] for place in swept] for one in combinations]), []
    for name, values in zip(names, combinations, strict=True):
        place = (f"output_dir={quoted(str(folder))}", f"name={quoted(name)}")
        cells.append(Cell(name=name, config_name=config_name, overrides=(*values, *place), config_dir=config_dir))
    sweep = SweepGrid(config_name, folder, tuple(cells))
    for cell in sweep.cells:
        sweep.run_folder(cell).check_free(cell.config)
    return sweep


def run_sweep(sweep: SweepGrid, *, jobs: int = 1, processes: int = 1) -> list[FailedCell]:
    """``run_grid``, with the sweep's list of its runs."""
    write_members(sweep)
    return run_grid(sweep, jobs=jobs, processes=processes)


def write_members(sweep: SweepGrid) -> None:
    """``sweep.yaml``: the runs with their overrides, those of earlier sweeps in the folder included."""
    path = sweep.folder / "sweep.yaml"
    check_folder(sweep.folder)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(hold(path.with_name(f".{path.name}.lock"), wait=True)):
        members = sweep_members(sweep.folder) if path.exists() else {}
        members |= {cell.name: list(cell.overrides) for cell in sweep.cells}
        text = yaml.safe_dump({"config": sweep.config_name, "members": members}, sort_keys=False, width=1000)
        write_text(path, text)


def _choices(override: Override) -> list[str]:
    """The overrides, one value each, that one of the command line stands for."""
    if not override.is_sweep_override():
        return [override.input_line]
    place = f"command line: {override.input_line}"
    if override.key_or_group in ("name", "output_dir"):
        raise ConfigError(f"{place}: a sweep's members are named after their other settings; give one value")
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise ConfigError(f"{place}: list the values, as in KEY=A,B, KEY=choice(A,B) or KEY=range(START,STOP,STEP)")
    values = [(value, Transformer.str(value)) for value in override.sweep_iterator(Transformer.identity)]
    # Hydra's own text of a value has backslashes, which a setting that is a text would keep.
    written = (quoted(value) if type(value) is str and value != text else text for value, text in values)
    choices = [f"{override.get_key_element()}={value}" for value in written]
    repeated = [choice for choice, count in Counter(choices).items() if count > 1]
    if repeated:
        raise ConfigError(f"{place}: {repeated[0]} is listed twice")
    return choices


def _names(swept: list[list[str]]) -> list[str]:
    """A folder's name for each member from its swept overrides: ``alpha=0.001,seed=2``."""
    keys = [line.partition("=")[0].lstrip("+") for line in swept[0]]
    last = [re.split(r"[.@]", key)[-1] for key in keys]
    shown = [short if last.count(short) == 1 else key for short, key in zip(last, keys, strict=True)]
    names = [
        ",".join(f"{key}={line.partition('=')[2]}" for key, line in zip(shown, lines, strict=True)) for lines in swept
    ]
    plain = [re.sub(r"[^\w.,=+-]+", "_", re.sub(r"[\[\]{}'\"]", "", name)) for name in names]
    digests = [hashlib.sha256(name.encode()).hexdigest()[:8] for name in names]
    return [
        short
        if plain.count(short) == 1 and len(short.encode()) <= LONGEST_NAME
        else f"{short.encode()[: LONGEST_NAME - 9].decode(errors='ignore')}-{digest}"
        for short, digest in zip(plain, digests, strict=True)
    ]
