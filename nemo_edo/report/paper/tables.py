"""A table of the paper joined with measured runs, as Markdown, CSV or one self-contained HTML file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, Pair, ratio_intervals
from nemo_edo.metrics import Interval, mean_interval
from nemo_edo.metrics.shares import mean_of_shares
from nemo_edo.report.page import render_page, write_whole
from nemo_edo.report.paper.published import (
    OUT_OF_DISTRIBUTION,
    OVERALL,
    TABLES,
    Column,
    Published,
    Row,
    evaluated_on,
    experiments,
    published,
    read_csv,
)
from nemo_edo.report.paper.settings import departures, tested_on
from nemo_edo.report.run_record import RunRecord, read_run, read_test_time, setting
from nemo_edo.report.run_set import FoundRuns

NOT_RUN, NOT_MEASURED = "not run", "not measured"
SEARCHED = {"searchllm": "cot"}
"""The search is with the policy of another row."""


class Policy(NamedTuple):
    """An evaluated policy that measures a row."""

    record: RunRecord
    arm: str


class Line(NamedTuple):
    """A number of the paper with the measured one, in the column's unit. A line of the CSV file has its fields."""

    paper: Published
    measured: Interval | None
    """95 %: over problems with one seed, over seeds (Student's t) with several."""
    deviation: float | None
    """Standard deviation over seeds (n - 1); None with one seed."""
    seeds: tuple[int, ...]
    state: str
    """Why nothing is measured, or empty."""

    def fields(self) -> dict[str, object]:
        """The line of the CSV file."""
        interval = self.measured or Interval(*[None] * 3)
        return {
            **self.paper.row._asdict(),
            "column": self.paper.column.title,
            "paper": self.paper.value,
            "paper_deviation": self.paper.deviation,
            **{"mean": interval.mean, "low": interval.low, "high": interval.high, "deviation": self.deviation},
            "seeds": " ".join(map(str, self.seeds)),
            "state": self.state,
        }


@dataclass(frozen=True)
class Table:
    name: str
    lines: list[Line]
    runs: list[str]
    """Those that measure a row: folder, seed and model."""
    left_out: list[str]
    """Runs and arms that measure none, with the reason."""


@dataclass
class Section:
    """The rows of one backbone and benchmark, as texts."""

    title: str
    heads: list[str]
    rows: dict[str, list[str]] = field(default_factory=dict)


def build_table(name: str, records: Sequence[RunRecord], left_out: Mapping[Path, str] | None = None) -> Table:
    """The table of that name (a key of ``TABLES``) with what the runs measured.

    Raises UserError where two runs measured the same row with one seed.
    """
    found: dict[Row, dict[int, Policy]] = {}
    runs: dict[str, None] = {}
    unused = [f"{folder}: {reason}" for folder, reason in (left_out or {}).items()]
    for record in records:
        for arm in record.evaluations:
            row, reasons = _measured_row(name, record, arm)
            if row is None:
                unused += [f"{record.folder}, {record.label(arm)}: {', '.join(reasons)}"]
                continue
            _add(found.setdefault(row, {}), Policy(record, arm), row)
            model = setting(record, "model.path") or "built-in model"
            runs[f"{record.folder} (seed {record.seed}, {model})"] = None
    return Table(name, [_line(paper, found) for paper in published(name)], list(runs), unused)


def _measured_row(name: str, record: RunRecord, arm: str) -> tuple[Row | None, list[str]]:
    """The row of the table that an arm measures, or why it measures none."""
    reasons = departures(record, arm)
    if reasons:
        return None, reasons
    measures = experiments()[record.config["experiment"]][arm]
    if name not in measures.tables:
        return None, [f"{record.config['experiment']} is for the tables {', '.join(measures.tables)}"]
    return measures.row._replace(evaluated_on=evaluated_on(tested_on(record), measures.row.trained_on)), []


def _add(by_seed: dict[int, Policy], policy: Policy, row: Row) -> None:
    """Raises UserError where a seed is there twice. Only the start of runs with arms may be: they share it, and the
    first counts."""
    known = by_seed.setdefault(policy.record.seed, policy)
    if known is not policy and not (policy.arm == START and policy.record.arms):
        raise UserError(
            f"{known.record.folder} and {policy.record.folder} both measured {row.method} on {row.evaluated_on} with "
            f"seed {policy.record.seed}: a seed counts once, so name one of them only"
        )


def _line(paper: Published, found: Mapping[Row, Mapping[int, Policy]]) -> Line:
    row = paper.row._replace(method=SEARCHED.get(paper.row.method, paper.row.method))
    benchmarks = OUT_OF_DISTRIBUTION if row.evaluated_on == OVERALL else (row.evaluated_on,)
    parts = [found.get(row._replace(evaluated_on=benchmark), {}) for benchmark in benchmarks]
    factor, by_seed = 100.0 if paper.column.percent else 1.0, {}
    for seed in sorted(set.intersection(*map(set, parts))):
        one = _of_one_seed(paper.column, [part[seed] for part in parts])
        if one is not None:
            by_seed[seed] = Interval(one.mean * factor, one.low * factor, one.high * factor)
    means = [interval.mean for interval in by_seed.values()]
    if len(means) > 1:
        return Line(paper, mean_interval(means), float(np.std(means, ddof=1)), tuple(by_seed), "")
    if means:
        return Line(paper, next(iter(by_seed.values())), None, tuple(by_seed), "")
    run = sum(map(bool, parts))
    state = NOT_RUN if not run else f"{run} of {len(parts)} benchmarks" if run < len(parts) else NOT_MEASURED
    return Line(paper, None, None, (), state)


def _of_one_seed(column: Column, policies: Sequence[Policy]) -> Interval | None:
    record, arm = policies[0]
    if column.iteration is not None:  # an evaluation made anew replaces the one before
        lines = record.of("evaluation", arm).query("iteration == @column.iteration")["metrics"]
        values = [metrics[name] for metrics in lines for name in column.metrics if name in metrics]
        ends = [values[-1].get(key) for key in ("mean", "low", "high")] if values else []
        return Interval(*(np.nan if end is None else end for end in ends)) if ends else None
    found = [_measured(column, policy) for policy in policies]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    resamples = setting(record, "evaluation.bootstrap")
    if len(known) == 1:
        [(metric, ratio)] = known
        return ratio_intervals({metric: ratio}, resamples=resamples, seed=record.seed)[metric]
    return mean_of_shares([ratio for _, ratio in known], resamples=resamples, seed=record.seed)


def _measured(column: Column, policy: Policy) -> tuple[str, Pair] | None:
    """The column's first metric that was measured: the evaluation's own first."""
    at_test_time = read_test_time(policy.record).get(policy.arm)
    ratios = {**(at_test_time.metrics if at_test_time else {}), **policy.record.evaluations[policy.arm].metrics}
    found = (name for name in column.metrics if name in ratios and ratios[name][1].sum() > 0)
    return next(((name, ratios[name]) for name in found), None)


def write_table(found: FoundRuns, name: str, out: Path | None = None) -> list[str]:
    """Builds the table and returns lines for the terminal: the table itself, or the path of ``out``.

    Raises UserError where a run cannot be read, and for a file that does not end in .html, .md or .csv.
    """
    render = {".html": html, ".md": markdown, ".csv": csv_text}
    if out is not None and out.suffix not in render:
        raise UserError(f"{out}: a table's file ends in {', '.join(render)}")
    table = build_table(name, [read_run(folder) for folder in found.folders], found.left_out)
    if out is None:
        return [markdown(table)]
    write_whole(out, render[out.suffix](table))
    return [f"table: {out}"]


def sections(table: Table) -> Iterable[Section]:
    """The table's lines as a reader wants them: a column for each quantity, the paper's before the measured."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in table.lines:
        found.setdefault(line.paper.row[:3], []).append(line)
    for (backbone, trained_on, tested), lines in found.items():
        titles = list(dict.fromkeys(line.paper.column.title for line in lines))
        heads = ["method", *(f"{title}, {source}" for title in titles for source in ("paper", "measured"))]
        section = Section(f"{backbone}, trained on {trained_on}, evaluated on {tested}", heads)
        for line in lines:
            texts = section.rows.setdefault(line.paper.row.method, [""] * (2 * len(titles)))
            place = 2 * titles.index(line.paper.column.title)
            texts[place : place + 2] = _paper_text(line.paper), _measured_text(line)
        yield section


def _paper_text(paper: Published) -> str:
    if paper.value is None:
        return ""
    if paper.deviation is not None:
        return f"{paper.value:g} ± {paper.deviation:g}"
    return f"{paper.value:.1f}" if paper.column.percent else f"{paper.value:g}"


def _measured_text(line: Line) -> str:
    """``79.1 [77.0, 81.3]``, and of several seeds ``79.1 ± 0.3 [78.3, 79.8], 3 seeds``."""
    if line.measured is None:
        return line.state
    form = ".1f" if line.paper.column.percent else ".4f"
    deviation = "" if line.deviation is None else f" ± {line.deviation:{form}}"
    seeds = f", {len(line.seeds)} seeds" if len(line.seeds) > 1 else ""
    return f"{line.measured.mean:{form}}{deviation} [{line.measured.low:{form}}, {line.measured.high:{form}}]{seeds}"


def notes(table: Table) -> list[str]:
    """What a reader has to know about the numbers: ``notes.csv``, the runs, and what is not in the table."""
    lines = read_csv("notes.csv")
    said = [line["note"] for line in lines if line["tables"] == "*" or table.name in line["tables"].split()]
    runs, unused = (f"Run: {run}" for run in table.runs), (f"Not in the table: {run}" for run in table.left_out)
    return [*said, *runs, *unused]


def markdown(table: Table) -> str:
    """The table for a terminal or a page of text."""
    lines = [f"# {TABLES[table.name]}", ""]
    for section in sections(table):
        lines += [f"## {section.title}", "", f"| {' | '.join(section.heads)} |", f"|{' --- |' * len(section.heads)}"]
        lines += [f"| {' | '.join((method, *texts))} |" for method, texts in section.rows.items()] + [""]
    plain = (" ".join(note.split()).replace("|", "\\|").replace("<", "&lt;") for note in notes(table))
    return "\n".join([*lines, *(f"- {note}" for note in plain)]) + "\n"


def csv_text(table: Table) -> str:
    """A line for each number of the paper."""
    file = io.StringIO(newline="")
    lines = [{"table": table.name, **line.fields()} for line in table.lines]
    writer = csv.DictWriter(file, lines[0])
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def html(table: Table) -> str:
    """The page. Everything in it is escaped."""
    return render_page("table.html.j2", title=TABLES[table.name], sections=list(sections(table)), notes=notes(table))
