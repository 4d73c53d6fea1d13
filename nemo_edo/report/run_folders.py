"""The folders of the runs that a report is of, found before any is read."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_edo.errors import UserError
from nemo_edo.run_folder import CONFIG, SUMMARY
from nemo_edo.utils.files import read_mapping

SWEEP = "sweep.yaml"


@dataclass(frozen=True)
class FoundRuns:
    folders: tuple[Path, ...]
    """The folders of finished runs."""
    left_out: dict[Path, str]
    """The folders of unfinished runs, with the reason."""
    common: Path
    """The folder that the report goes to by default."""


def find_runs(arguments: Sequence[str]) -> FoundRuns:
    """The runs that folders and patterns name: a run's folder, or a folder of runs, such as a sweep's.

    Raises UserError for an argument that names no run, and where none of several runs has finished.
    """
    named: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(argument))]
        runs: list[Path] = []
        for match in matches:
            if (match / CONFIG).is_file():
                if not _is_run(match) and match == path:
                    raise UserError(f"{match} is the folder of another job, such as a reward model's, not of a run")
                runs += [match] * _is_run(match)
            elif (match / SWEEP).is_file():
                runs += [match / name for name in sweep_members(match)]
            else:
                runs += sorted(config.parent for config in match.glob(f"*/{CONFIG}") if _is_run(config.parent))
        if not runs:
            raise UserError(f"{argument}: {'no run is in it' if matches else 'no such folder'}; name folders of runs")
        named += [run for run in runs if run not in named]
    left_out = {}
    for run in named:
        if not (run / CONFIG).is_file():
            left_out[run] = "it has not started"
        elif not (run / SUMMARY).is_file():
            left_out[run] = "it has not finished"
    finished = tuple(run for run in named if run not in left_out)
    if not finished:
        many = f"none of the {len(named)} runs has finished; " if len(named) > 1 else ""
        raise UserError(f"{many}{named[0]}: {left_out[named[0]]} (it has no {SUMMARY}); nemo-edo train resumes it")
    alone = len(arguments) == 1 and Path(arguments[0]).is_dir()
    common = Path(arguments[0]) if alone else Path(os.path.commonpath([run.absolute().parent for run in named]))
    return FoundRuns(finished, left_out, common)


def _is_run(folder: Path) -> bool:
    return re.search(r"^job: (?!null)", (folder / CONFIG).read_text(encoding="utf-8"), re.MULTILINE) is None


def sweep_members(folder: Path) -> dict[str, list[str]]:
    """The overrides of each member by name, from a sweep's folder. Raises UserError for a ``sweep.yaml`` of others."""
    path = folder / SWEEP
    members = read_mapping(path).get("members")
    if not isinstance(members, dict):
        raise UserError(f"{path}: members is {members!r:.40}, expected a mapping from names to overrides")
    if outside := next((name for name in members if "/" in str(name) or str(name).startswith(".")), None):
        raise UserError(f"{path}: members has {outside!r}, which is not the name of a folder in this one")
    return members
