"""A table of the paper joined with measured runs, as Markdown, CSV or one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

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
from nemo_edo.report.run_set import FoundRuns, Trained

NOT_RUN, NOT_MEASURED = "not run", "not measured"
SEARCHED = {"searchllm": "cot"}
"""The search is with the policy of another row."""


class Line(NamedTuple):
    """A number of the paper with the measured one, in the column's unit."""

    paper: Published
    measured: Interval | None
    """95 %: over problems with one seed, over seeds (Student's t) with several."""
    deviation: float | None
    """Standard deviation over seeds (n - 1); None with one seed."""
    seeds: tuple[int, ...]
    state: str
    """Why nothing is measured, or empty."""


@dataclass(frozen=True)
class Table:
    name: str
    lines: list[Line]
    runs: list[str]
    """Those that measure a row: folder, seed and model."""
    left_out: list[str]
    """Runs and arms that measure none, with the reason."""


def build_table(name: str, records: Sequence[RunRecord], left_out: Mapping[Path, str] | None = None) -> Table:
    """The table of that name (a key of ``TABLES``) with what the runs measured.

    Raises UserError where two runs measured the same row with one seed.
    """
    found: dict[Row, dict[int, Trained]] = {}
    runs: dict[str, None] = {}
    unused = [f"{folder}: {reason}" for folder, reason in (left_out or {}).items()]
    for record in records:
        for arm in record.evaluations:
            row, reasons = _measured_row(name, record, arm)
            if row is None:
                unused += [f"{record.folder}, {record.label(arm)}: {', '.join(reasons)}"]
                continue
            first = found.setdefault(row, {}).setdefault(record.seed, Trained(record, arm))
            # Only the start of runs with arms may be there twice: they share it, and the first counts.
            again = first.record is not record or first.name != arm
            if again and not (arm == START and record.arms):
                raise UserError(
                    f"{first.record.folder} and {record.folder} both measured {row.method} on {row.evaluated_on} with "
                    f"seed {record.seed}: a seed counts once, so name one of them only"
                )
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


def _line(paper: Published, found: Mapping[Row, Mapping[int, Trained]]) -> Line:
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


def _of_one_seed(column: Column, policies: Sequence[Trained]) -> Interval | None:
    record = policies[0].record
    if column.iteration is not None:  # an evaluation made anew replaces the one before
        lines = policies[0].lines("evaluation").query("iteration == @column.iteration")["metrics"]
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


def _measured(column: Column, policy: Trained) -> tuple[str, Pair] | None:
    """The column's first metric that was measured: the evaluation's own first."""
    at_test_time = read_test_time(policy.record).get(policy.name)
    ratios = {**(at_test_time.metrics if at_test_time else {}), **policy.evaluation.metrics}
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


def sections(table: Table) -> list[dict[str, Any]]:
    """The rows of each backbone and benchmark as a reader wants them: title, heads and the texts of each method, a
    column for each quantity, the paper's before the measured."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in table.lines:
        found.setdefault(line.paper.row[:3], []).append(line)
    made = []
    for (backbone, trained_on, tested), lines in found.items():
        titles = list(dict.fromkeys(line.paper.column.title for line in lines))
        cells = {(line.paper.row.method, line.paper.column.title): line for line in lines}
        rows = {}
        for method in dict.fromkeys(line.paper.row.method for line in lines):
            of_method = [cells.get((method, title)) for title in titles]
            rows[method] = [text for one in of_method for text in (("", "") if one is None else _texts(one))]
        heads = ["method", *(f"{title}, {source}" for title in titles for source in ("paper", "measured"))]
        title = f"{backbone}, trained on {trained_on}, evaluated on {tested}"
        made.append({"title": title, "heads": heads, "rows": rows})
    return made


def _texts(line: Line) -> tuple[str, str]:
    """The paper's number and the measured one: ``79.1 [77.0, 81.3]``, and of several seeds
    ``79.1 ± 0.3 [78.3, 79.8], 3 seeds``."""
    paper, measured, form = line.paper, line.measured, ".1f" if line.paper.column.percent else ".4f"
    said = "" if paper.value is None else f"{paper.value:.1f}" if paper.column.percent else f"{paper.value:g}"
    if paper.deviation is not None:
        said = f"{paper.value:g} ± {paper.deviation:g}"
    if measured is None:
        return said, line.state
    deviation = "" if line.deviation is None else f" ± {line.deviation:{form}}"
    seeds = f", {len(line.seeds)} seeds" if len(line.seeds) > 1 else ""
    return said, f"{measured.mean:{form}}{deviation} [{measured.low:{form}}, {measured.high:{form}}]{seeds}"


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
        heads = section["heads"]
        lines += [f"## {section['title']}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        lines += [f"| {' | '.join((method, *texts))} |" for method, texts in section["rows"].items()] + [""]
    plain = (" ".join(note.split()).replace("|", "\\|").replace("<", "&lt;") for note in notes(table))
    return "\n".join([*lines, *(f"- {note}" for note in plain)]) + "\n"


def csv_text(table: Table) -> str:
    """A line for each number of the paper."""
    rows = []
    for line in table.lines:
        paper, measured = line.paper, line.measured or Interval(None, None, None)
        found = {"mean": measured.mean, "low": measured.low, "high": measured.high, "deviation": line.deviation}
        rows.append({
            **{"table": table.name, **paper.row._asdict(), "column": paper.column.title},
            **{"paper": paper.value, "paper_deviation": paper.deviation, **found},
            **{"seeds": " ".join(map(str, line.seeds)), "state": line.state},
        })  # fmt: skip
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\r\n")


def html(table: Table) -> str:
    """The page. Everything in it is escaped."""
    return render_page("table.html.j2", title=TABLES[table.name], sections=sections(table), notes=notes(table))
