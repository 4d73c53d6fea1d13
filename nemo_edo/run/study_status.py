"""How far a study is: the cells that are left, what they will cost, those whose settings have changed since, and at its
end the verdict on its claim."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.evaluation.results import START
from nemo_edo.report.gains import gains, markdown, verdict
from nemo_edo.run.study_file import Cell, Study
from nemo_edo.run.study_table import cell_of, config_digest, read_rows
from nemo_edo.run.sweep import quoted


def unfinished(study: Study) -> list[Cell]:
    """The cells that the table does not have."""
    done = {cell_of(row) for row in read_rows(study.table)}
    return [cell for cell in study.cells if cell.key not in done]


def composed(study: Study, cell: Cell) -> RunConfig:
    """The config of a cell's run. Raises ConfigError."""
    place = [f"name={quoted(cell.name)}", f"output_dir={quoted(str(study.folder))}"]
    return compose_run(cell.config, [*cell.overrides, *place])


def changed_cells(study: Study) -> list[Cell]:
    """Finished cells whose settings have changed since. Composes each arm of a task once: seeds differ in no other
    setting."""
    digests = {cell_of(row): row["config"] for row in read_rows(study.table)}
    finished = {(cell.task, cell.arm, cell.dose): cell for cell in study.cells if cell.key in digests}
    return [cell for cell in finished.values() if config_digest(composed(study, cell)) != digests[cell.key]]


def cpu_hours_left(study: Study) -> float | None:
    """From the mean CPU seconds of the finished cells of each task, or of all where a task has none, with the warm-ups
    that are missing; None before the first cell."""
    seconds = {cell_of(row): float(row["cpu_seconds"]) for row in read_rows(study.table)}
    trained = {key: cost for key, cost in seconds.items() if key[1] != START}
    starts = {key: cost for key, cost in seconds.items() if key[1] == START}
    if not trained:
        return None
    left = unfinished(study)
    missing = {(cell.task, cell.seed) for cell in left} - {(task, seed) for task, _, _, seed in starts}
    total = sum(_mean_of(trained, cell.task) for cell in left)
    total += sum(_mean_of(starts or trained, task) for task, _ in missing)
    return total / 3600


def status_lines(study: Study) -> list[str]:
    left, hours = unfinished(study), cpu_hours_left(study)
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


def verdict_lines(study: Study) -> list[str]:
    """Of a held-out study whose cells are all done: the verdict on its claim, and its table. Otherwise nothing."""
    if not study.held_out or unfinished(study):
        return []
    wanted = {cell.key for cell in study.cells}
    found = gains([row for row in read_rows(study.table) if cell_of(row) in wanted], study.baselines)
    return [verdict(found), markdown(found)]


def _mean_of(seconds: dict[tuple[str, str, str, int], float], task: str) -> float:
    own = [cost for key, cost in seconds.items() if key[0] == task]
    return fmean(own or seconds.values())
