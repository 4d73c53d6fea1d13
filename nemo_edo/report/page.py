"""The report of a run or of several: one self-contained HTML file.

No request leaves the page, whatever the responses in it contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import POOLED, main_metrics, metric_name
from nemo_edo.report.charts import all_charts
from nemo_edo.report.comparison import Comparison, compare
from nemo_edo.report.conclusions import conclusions, direction, short_name, terminal_table
from nemo_edo.report.facts import differing_settings, duration, facts, headline, markdown_table, phases
from nemo_edo.report.run_set import RunSet
from nemo_edo.report.sample_browser import sample_browser
from nemo_edo.report.search_tree import read_trees
from nemo_edo.report.table_export import numbers
from nemo_edo.utils.files import write_text

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY = Path(__file__).parent / "vendor" / "plotly-basic.min.js"
"""Plotly's partial bundle of scatter, bar and pie charts (npm's plotly.js-basic-dist-min 4.1.1): a quarter of the whole
that the Python package has."""
FILTERS = {"metric_name": metric_name, "duration": duration, "direction": direction, "short_name": short_name}


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    path: Path
    comparison: Comparison
    conclusions: list[str]

    @property
    def lines(self) -> list[str]:
        """What ``nemo-edo report`` prints: of one run only the path, as the rest was printed when it finished."""
        if self.comparison.is_one:
            return [str(self.path)]
        sentences = (f"- {sentence}" for sentence in self.conclusions)
        return [terminal_table(self.comparison), "", *sentences, f"report: {self.path}"]


def write_report(found: RunSet, out: Path | None = None, baseline: str | None = None) -> Report:
    """Writes the runs' report to ``out``, by default ``report.html`` in the run's folder or the one of all the runs.

    Writes the numbers next to it as CSV and JSON; each file appears whole or stays as it was.
    baseline: see ``compare``. Raises UserError for an unknown baseline, for a file not named ``.html`` or that cannot
    be written, and naming the file, and the line or key, where an input is missing or malformed.
    """
    path = out or found.folder / "report.html"
    if path.suffix != ".html":
        raise UserError(f"{path}: a report's file ends in .html")
    comparison = compare(found, baseline)
    said = conclusions(comparison)
    texts = {".html": render(comparison, said, title=path.parent.name or "runs"), **numbers(comparison, said)}
    for suffix, text in texts.items():
        write_whole(path.with_suffix(suffix), text)
    return Report(path, comparison, said)


def write_whole(path: Path, text: str) -> None:
    """Writes a file, its folder made. Raises UserError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def render(comparison: Comparison, said: list[str], title: str) -> str:
    """The page. title: of several runs; one has its name. Everything is escaped except plotly's own script and the
    charts that plotly wrote."""
    main = main_metrics(comparison.metrics)
    first = [metric for metric in main if metric not in ("accuracy", POOLED)]
    records = comparison.runs.records
    run = records[0] if comparison.is_one else None
    return render_page(
        "report.html.j2",
        title=run.summary["name"] if run else title,
        run=run,
        records=records,
        comparison=comparison,
        labels=comparison.labels,
        headline=headline(comparison),
        facts=facts(comparison),
        conclusions=said,
        main_metrics=main,
        first_metrics=first,
        markdown=markdown_table(comparison, first),
        charts=all_charts(comparison, first),
        samples=sample_browser(comparison),
        differing=differing_settings(comparison.runs),
        phases=phases(comparison.runs),
        trees=read_trees(run.folder) if run else [],
        plotly_js=Markup(PLOTLY.read_text(encoding="utf-8")),
    )


def render_page(template: str, **values: Any) -> str:
    """A page of ``templates/``; whatever text is put into it is escaped."""
    loader = FileSystemLoader(TEMPLATES)
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, **options)
    environment.filters |= FILTERS
    return environment.get_template(template).render(Markup=Markup, **values)
