"""The paper's tables with measured numbers beside its own.

A number stands beside the paper's only where the run's settings that the paper gives are the paper's
(``paper_settings``); every other arm of the runs has its numbers below, in a section of its own with the reasons.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_edo.evaluation.comparison import START
from nemo_edo.evaluation.measured import (
    Entry,
    Measured,
    mean_of_ratios,
    measured,
    one_a_seed,
    over_seeds,
    ratio_of,
    scaled,
    tested_on,
)
from nemo_edo.evaluation.paper_settings import NO_EXPERIMENT, departures
from nemo_edo.evaluation.paper_tables import (
    COLUMNS,
    EXPERIMENTS,
    OUT_OF_DISTRIBUTION,
    OVERALL,
    TABLES,
    VOTE,
    Column,
    PaperValue,
    Row,
    paper_values,
    rows_of,
)
from nemo_edo.evaluation.run_record import RunRecord, setting
from nemo_edo.evaluation.run_set import MAY_DIFFER, arm_settings, flattened
from nemo_edo.evaluation.test_time_record import read_test_time

NOT_RUN, NOT_MEASURED = "not run", "not measured"


@dataclass(frozen=True)
class Cell:
    paper: tuple[PaperValue, ...] = ()
    elsewhere: tuple[PaperValue, ...] = ()
    """What the paper's other tables have for the same policy and quantity, where it is another value."""
    measured: Measured | None = None
    state: str = ""
    """Why nothing is measured."""


@dataclass(frozen=True)
class Line:
    label: str
    cells: tuple[Cell, ...]
    """One for each column of the table."""


@dataclass(frozen=True)
class Section:
    title: str
    lines: tuple[Line, ...]
    comparable: bool = True
    """Whether the numbers may stand beside the paper's."""
    reasons: tuple[str, ...] = ()
    """What of the runs is not as in the paper."""
    runs: tuple[str, ...] = ()
    """Folders, with the model that each begins with."""


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    left_out: dict[Path, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return TABLES[self.name]

    @property
    def has_paper(self) -> bool:
        """Whether the paper has numbers for it: accuracy over iterations is a figure there."""
        return self.name in COLUMNS


def build_table(name: str, records: Sequence[RunRecord], left_out: Mapping[Path, str] | None = None) -> Table:
    """The table of that name (a key of ``TABLES``) with what the runs measured.

    Raises UserError where two runs measured the same cell with one seed.
    """
    elsewhere = {record.folder: reason for record in records if (reason := _of_another_table(name, record))}
    entries = [entry for record in records if record.folder not in elsewhere for entry in _entries(record)]
    columns = _columns(name, entries)
    good = [entry for entry in entries if not entry.reasons]
    others = [entry for entry in entries if entry.reasons]
    sections = [*_paper_sections(name, columns, good), *_other_sections(columns, others)]
    return Table(name, columns, tuple(sections), {**(left_out or {}), **elsewhere})


# --- what the runs measured -----------------------------------------------------------------------------------------


def _of_another_table(name: str, record: RunRecord) -> str | None:
    experiment = EXPERIMENTS.get(record.config.get("experiment"))
    if experiment is None or name in experiment.tables:
        return None
    return f"{record.config['experiment']} is for the tables {', '.join(experiment.tables)}"


def _entries(record: RunRecord) -> list[Entry]:
    test_time = read_test_time(record)
    experiment = EXPERIMENTS.get(record.config.get("experiment"))
    found = []
    for arm, evaluation in record.evaluations.items():
        if experiment is not None and arm == START and START not in experiment.methods:
            continue  # the policy that another experiment's start is too
        of_curves = test_time[arm].metrics if arm in test_time else {}
        found.append(Entry(record, arm, {**of_curves, **evaluation.metrics}, tuple(departures(record, arm))))
    return found


def _columns(name: str, entries: Iterable[Entry]) -> tuple[Column, ...]:
    """The paper's, and those of other reward models that the runs were scored by; of accuracy over iterations, one for
    each iteration that was evaluated."""
    if name == "iterations":
        voted = [line for entry in entries for line in entry.evaluated if set(line["metrics"]) & set(VOTE.metrics)]
        shown = sorted({0, 1, 2, 3, *(line["iteration"] for line in voted)})
        return tuple(Column(f"{VOTE.title} after {t}", VOTE.metrics, iteration=t) for t in shown)
    known = {metric for column in COLUMNS[name] for metric in column.metrics}
    others = sorted({m for entry in entries for m in entry.ratios if m.startswith("best_of@10/")} - known)
    more = [Column(f"best-of-10 by {metric.partition('/')[2]}", (metric,)) for metric in others]
    return (*COLUMNS[name], *(more if name in ("seeds", "alpha", "test_time") else ()))


# --- the paper's rows -----------------------------------------------------------------------------------------------


def _paper_sections(name: str, columns: Sequence[Column], entries: Sequence[Entry]) -> list[Section]:
    by_row: dict[tuple, list[Entry]] = {}
    for entry in entries:
        by_row.setdefault(_key(entry.row), []).append(entry)
    lines: dict[tuple[str, str, str], list[Line]] = {}
    runs: dict[tuple[str, str, str], list[str]] = {}
    for row in rows_of(name):
        section = row.backbone, row.trained_on, row.evaluated_on
        key = (*section, "cot" if row.method == "searchllm" else row.method)
        what = f"{row.method} on {row.evaluated_on}"
        found = one_a_seed(by_row.get(key, []), what)
        cells = tuple(_paper_cell(name, row, column, found, by_row) for column in columns)
        lines.setdefault(section, []).append(Line(row.method, cells))
        runs.setdefault(section, []).extend(_run_name(entry) for entry in found)
    return [
        Section(_section_title(*section), tuple(found), runs=tuple(dict.fromkeys(runs[section])))
        for section, found in lines.items()
    ]


def _key(row: Row) -> tuple[str, str, str, str]:
    return row.backbone, row.trained_on, row.evaluated_on, row.method


def _paper_cell(
    name: str, row: Row, column: Column, entries: Sequence[Entry], by_row: Mapping[tuple, Sequence[Entry]]
) -> Cell:
    paper = tuple(row.values.get(column, ()))
    if name == "test_time" and not paper and column in COLUMNS[name]:
        return Cell()  # a method and a strategy that the paper does not put together
    quantities = {value.quantity for value in paper}
    elsewhere = tuple(
        value
        for value in paper_values()
        if value.quantity in quantities and value.value not in {p.value for p in paper}
    )
    if row.evaluated_on == OVERALL:
        found, state = _overall(row, column, by_row)
    else:
        found = measured(column, entries)
        state = "" if found else NOT_MEASURED if entries else NOT_RUN
    return Cell(paper, elsewhere, found, state)


def _overall(row: Row, column: Column, by_row: Mapping[tuple, Sequence[Entry]]) -> tuple[Measured | None, str]:
    """The plain mean over the benchmarks, of the seeds that measured all of them; its interval with one seed is over
    problems, drawn anew within each benchmark."""
    key = row.backbone, row.trained_on
    of = {name: {e.seed: e for e in by_row.get((*key, name, row.method), [])} for name in OUT_OF_DISTRIBUTION}
    ratios = {
        name: {seed: ratio for seed, entry in found.items() if (ratio := ratio_of(column, entry)) is not None}
        for name, found in of.items()
    }
    seeds = set.intersection(*(set(found) for found in ratios.values()))
    if not seeds:
        there = sum(bool(found) for found in ratios.values())
        return None, f"{there} of {len(ratios)} benchmarks" if there else NOT_RUN
    resamples = setting(next(iter(of[OUT_OF_DISTRIBUTION[0]].values())).record, "evaluation.bootstrap")
    found = {
        seed: scaled(mean_of_ratios([found[seed] for found in ratios.values()], resamples, seed), 100.0)
        for seed in seeds
    }
    return over_seeds(found), ""


def _section_title(backbone: str, trained_on: str, tested_on: str) -> str:
    return f"{backbone}, trained on {trained_on}, evaluated on {tested_on}"


# --- other runs -----------------------------------------------------------------------------------------------------


def _other_sections(columns: Sequence[Column], entries: Sequence[Entry]) -> list[Section]:
    """Runs that agree in all but arms and seeds make a section."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_common_settings(entry.record), []).append(entry)
    sections = []
    for found in groups.values():
        by_arm: dict[tuple[str, str], list[Entry]] = {}
        for entry in found:
            own = {} if entry.arm == START else arm_settings(entry.record, entry.arm)
            by_arm.setdefault((entry.label, json.dumps(own, sort_keys=True, default=str)), []).append(entry)
        lines = []
        for (label, _), same in by_arm.items():
            numbers = [measured(column, one_a_seed(same, label)) for column in columns]
            lines.append(Line(label, tuple(Cell(measured=m, state="" if m else NOT_MEASURED) for m in numbers)))
        reasons = tuple(dict.fromkeys(_reason(entry, reason) for entry in found for reason in entry.reasons))
        runs = tuple(dict.fromkeys(_run_name(entry) for entry in found))
        sections.append(Section(_other_title(found[0].record), tuple(lines), False, reasons, runs))
    return sections


def _reason(entry: Entry, reason: str) -> str:
    """What is said of a whole run is not said of each arm."""
    whole = reason == NO_EXPERIMENT or reason.startswith(("model.", "data.", "sampling.", "sft.", "lora.", "it is "))
    return reason if whole else f"{entry.label}: {reason}"


def _common_settings(record: RunRecord) -> str:
    settings = {
        key: value
        for key, value in flattened(record.config).items()
        if not any(f"{key}.".startswith(f"{prefix}.") for prefix in MAY_DIFFER)
    }
    return json.dumps([record.config.get("experiment"), settings], sort_keys=True, default=str)


def _other_title(record: RunRecord) -> str:
    train, tested = setting(record, "data").get("benchmark"), tested_on(record)
    built_in = setting(record, "data.test") is None
    data = "the built-in task" if built_in else f"trained on {train or 'own data'}, evaluated on {tested or 'own data'}"
    return f"{record.config.get('experiment') or record.config['name']}: {_model(record)}, {data}"


def _model(record: RunRecord) -> str:
    path, architecture = setting(record, "model.path"), setting(record, "model.architecture") or {}
    if path:
        return Path(path).name
    return f"{architecture.get('model_type')} of {architecture.get('num_hidden_layers')} layers, random weights"


def _run_name(entry: Entry) -> str:
    return f"{entry.record.folder} (seed {entry.seed}, {setting(entry.record, 'model.path') or 'built-in model'})"
