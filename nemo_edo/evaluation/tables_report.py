"""A table of the paper beside measured numbers, as Markdown, CSV or one self-contained HTML file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.evaluation.measured import Measured
from nemo_edo.evaluation.paper_tables import DISTINCT, Column, PaperValue
from nemo_edo.evaluation.report import render_page
from nemo_edo.evaluation.run_record import read_run
from nemo_edo.evaluation.run_set import FoundRuns
from nemo_edo.evaluation.tables import Cell, Line, Section, Table, build_table

SUFFIXES = (".html", ".md", ".csv")
FIELDS = (
    *("table", "section", "comparable", "row", "column", "paper", "paper_deviation", "paper_elsewhere"),
    *("mean", "low", "high", "deviation", "seeds", "state"),
)
"""Of the CSV file, a line for each cell: ``paper_elsewhere`` has TABLE=VALUE of the paper's other tables."""
NOTES = {
    "main": "",
    "ood": "Overall is the plain mean of the five benchmarks.",
    "seeds": "",
    "alpha": "Alpha 0 is GRPO, or ETO.",
    "test_time": "Best-of-10 takes the response whose last step the reward model scores highest: qwen is "
    "Qwen2.5-Math-PRM-7B, skywork Skywork-PRM-1.5B.",
    "iterations": "The paper has a figure of it without numbers. After 0 iterations every arm is its start.",
}
AGGREGATORS = (
    'Accuracies in percent. "greedy": one greedy response. "vote@10": the majority answer of ten responses at '
    "temperature 1, the expected score where answers tie."
)
CALLED_BEST_OF_N = (
    'The paper calls the accuracy of this table "BoN@10". Its values agree with those of the vote in its other tables, '
    "and not with best-of-10 by a reward model, so they stand beside the vote."
)
DISTINCT_NOTE = (
    "Distinct-4: distinct 4-grams of tokens over all 4-grams of a problem's ten responses, mean over problems. The "
    "paper does not say whether it counts by problem."
)
VERIFIED = (
    "Answers are verified by this package's rules or by a judge of the user's choice (rewards.verifier); the paper "
    "took exact match for GSM8K and MATH and a language model's verdicts for s1K and the five other benchmarks."
)
INTERVALS = (
    "Intervals are 95 %: over problems (bootstrap) with one seed, over seeds (Student's t) with several; then ± is the "
    "standard deviation over seeds."
)
NOT_CHECKED = (
    "A model is known by its sizes, not by its weights: that they are those of the paper's checkpoint, model.path has "
    "to say."
)


def write_table(found: FoundRuns, name: str, out: Path | None = None) -> list[str]:
    """Builds the table and returns lines for the terminal: the table itself, or the path of ``out`` that it went to.

    Raises UserError where a run cannot be read, and for a file of another kind than ``SUFFIXES``.
    """
    if out is not None and out.suffix not in SUFFIXES:
        raise UserError(f"{out}: a table's file ends in {', '.join(SUFFIXES)}")
    table = build_table(name, [read_run(folder) for folder in found.folders], found.left_out)
    if out is None:
        return [markdown(table)]
    render = {".html": html, ".md": markdown, ".csv": csv_text}[out.suffix]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(table), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror})") from error
    return [f"table: {out}"]


def notes(table: Table) -> list[str]:
    """What a reader has to know of the numbers."""
    named = [CALLED_BEST_OF_N] if table.name in ("seeds", "alpha") else []
    distinct = [DISTINCT_NOTE] if DISTINCT in table.columns else []
    return [note for note in (AGGREGATORS, NOTES[table.name], *named, *distinct, VERIFIED, INTERVALS) if note] + [
        NOT_CHECKED
    ]


def heads(table: Table, section: Section) -> list[str]:
    """The columns' titles; each has the paper's number and the measured one, where they may stand beside each other."""
    beside = table.has_paper and section.comparable
    return [f"{c.title}, {of}" for c in table.columns for of in (("paper", "measured") if beside else ("measured",))]


def cells(table: Table, section: Section, line: Line) -> list[str]:
    """The line's texts, under ``heads``."""
    texts = []
    for column, cell in zip(table.columns, line.cells, strict=True):
        if table.has_paper and section.comparable:
            texts.append(paper_text(column, cell))
        texts.append(measured_text(column, cell.measured) if cell.measured else cell.state)
    return texts


def paper_text(column: Column, cell: Cell) -> str:
    """The paper's value, and in brackets what its other tables have for the same, where it is another one."""
    own = " or ".join(_value(column, value) for value in cell.paper)
    others = ", ".join(f"{value.table}: {_value(column, value)}" for value in cell.elsewhere)
    return f"{own} ({others})" if others else own


def measured_text(column: Column, found: Measured) -> str:
    """``79.1 [77.0, 81.3]``, and of several seeds ``79.1 ± 0.3 [78.3, 79.8], 3 seeds``."""
    deviation = "" if found.deviation is None else f" ± {_number(column, found.deviation)}"
    seeds = f", {len(found.seeds)} seeds" if len(found.seeds) > 1 else ""
    return (
        f"{_number(column, found.mean)}{deviation} [{_number(column, found.low)}, {_number(column, found.high)}]{seeds}"
    )


def _value(column: Column, value: PaperValue) -> str:
    spread = "" if value.spread is None else f" ± {value.spread:g}"
    return f"{value.value:g}{spread}" if spread or not column.percent else f"{value.value:.1f}"


def _number(column: Column, value: float) -> str:
    return f"{value:.1f}" if column.percent else f"{value:.4f}"


def markdown(table: Table) -> str:
    """The table for a terminal or a page of text."""
    lines = [f"# {table.title}", ""]
    for section in table.sections:
        lines += [f"## {_plain(section.title)}", ""]
        if not section.comparable:
            lines += ["Not comparable with the paper's numbers:", "", *(f"- {_plain(r)}" for r in section.reasons), ""]
        titles = ["method" if section.comparable else "arm", *heads(table, section)]
        lines += [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
        for line in section.lines:
            lines.append(f"| {' | '.join(_plain(text) for text in (line.label, *cells(table, section, line)))} |")
        lines += ["", *(f"Run: {_plain(run)}" for run in section.runs), *([""] if section.runs else [])]
    lines += [f"- {note}" for note in notes(table)]
    lines += [f"- Left out: {folder}: {reason}" for folder, reason in table.left_out.items()]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """In one line, without the sign that parts a table's cells, and without HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def csv_text(table: Table) -> str:
    """A line for each cell, ``FIELDS``."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, FIELDS)
    writer.writeheader()
    for section in table.sections:
        for line in section.lines:
            for column, cell in zip(table.columns, line.cells, strict=True):
                writer.writerow(
                    {
                        "table": table.name,
                        "section": section.title,
                        "comparable": section.comparable,
                        "row": line.label,
                        "column": column.title,
                        "paper": " ".join(f"{value.value:g}" for value in cell.paper),
                        "paper_deviation": " ".join(f"{v.spread:g}" for v in cell.paper if v.spread is not None),
                        "paper_elsewhere": " ".join(f"{value.table}={value.value:g}" for value in cell.elsewhere),
                        **_measured_fields(cell.measured),
                        "state": cell.state,
                    }
                )
    return file.getvalue()


def _measured_fields(found: Measured | None) -> dict[str, Any]:
    if found is None:
        return {}
    seeds = " ".join(map(str, found.seeds))
    return {"mean": found.mean, "low": found.low, "high": found.high, "deviation": found.deviation, "seeds": seeds}


def html(table: Table) -> str:
    """The page. Everything in it is escaped."""
    return render_page("table.html.j2", table=table, heads=heads, cells=cells, notes=notes(table))
