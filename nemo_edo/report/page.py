"""The report of a run or of several: one self-contained HTML file.

No request leaves the page, whatever the responses in it contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import main_metrics, metric_name
from nemo_edo.report.case_study import Group, case_study
from nemo_edo.report.charts import all_charts
from nemo_edo.report.comparison import Comparison, compare
from nemo_edo.report.conclusions import conclusions, direction
from nemo_edo.report.run_record import RunRecord, setting
from nemo_edo.report.run_set import RunSet
from nemo_edo.report.search_tree import read_trees
from nemo_edo.report.table_export import numbers
from nemo_edo.utils.files import replacing

TEMPLATES = Path(__file__).parent / "templates"


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
        return [*(f"- {sentence}" for sentence in self.conclusions), f"report: {self.path}"]


def write_report(found: RunSet, out: Path | None = None, baseline: str | None = None) -> Report:
    """Writes the runs' report to ``out``, by default ``report.html`` in the run's folder or the one of all the runs.

    Writes the numbers next to it as CSV and JSON; each file appears whole or stays as it was.
    baseline: see ``compare``. Raises UserError for an unknown baseline, for a file not named ``.html`` or that cannot
    be written, and naming the file, and the line or key, where an input is missing or malformed.
    """
    path = html_path(out or found.folder / "report.html")
    comparison = compare(found, baseline)
    said = conclusions(comparison)
    texts = {".html": render(comparison, said, title=path.parent.name or "runs"), **numbers(comparison, said)}
    for suffix, text in texts.items():
        write_whole(path.with_suffix(suffix), text)
    return Report(path, comparison, said)


def write_whole(path: Path, text: str) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        with replacing(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def html_path(out: Path) -> Path:
    """The report's path, its folder made. Raises UserError where it cannot be one."""
    if out.suffix != ".html":
        raise UserError(f"{out}: a report's file ends in .html")
    make_folder(out.parent)
    return out


def make_folder(folder: Path) -> None:
    """Raises UserError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror})") from error


def render(comparison: Comparison, said: list[str], title: str) -> str:
    """The page. title: of several runs; one has its name. Everything is escaped except plotly's own script and the
    charts that plotly wrote."""
    charts, undrawn = all_charts(comparison)
    main = main_metrics(comparison.metrics)
    records = comparison.runs.records
    [run] = records if comparison.is_one else [None]
    return render_page(
        "report.html.j2",
        title=run.summary["name"] if run else title,
        run=run,
        records=records,
        comparison=comparison,
        labels=comparison.labels,
        settings={arm: next(iter(by_seed.values())).settings for arm, by_seed in comparison.arms.items()},
        facts=_facts(comparison),
        conclusions=said,
        main_metrics=main,
        shown_metrics=[*main, *(m for m in comparison.metrics if m in ("well_formed", "response_length"))],
        charts=charts,
        undrawn=undrawn,
        case=case_study(run) if run else None,
        trees=read_trees(run.folder) if run else [],
    )


def render_page(template: str, **values: Any) -> str:
    """A page of ``templates/`` with plotly's script inside; whatever text is put into it is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "metric_name": metric_name,
        "settings_number": _settings_number,
        "duration": _duration,
        "verdict": _verdict,
        "direction": direction,
    }
    return environment.get_template(template).render(plotly_js=Markup(get_plotlyjs()), Markup=Markup, **values)


def _facts(comparison: Comparison) -> dict[str, str]:
    """What was run, and on how much data. Comparable runs share their data, model, warm-up and evaluation."""
    records = comparison.runs.records
    record, seeds = records[0], ", ".join(map(str, comparison.seeds))
    left_out = f", {len(comparison.runs.left_out)} left out" if comparison.runs.left_out else ""
    samples, rollouts = setting(record, "evaluation.samples"), setting(record, "evaluation.rollouts")
    seconds = sum(one.summary["time"]["total_s"] for one in records)
    versions = {", ".join(f"{name} {version}" for name, version in one.summary["versions"].items()) for one in records}
    return {
        **({} if comparison.is_one and not left_out else {"Runs": f"{len(records)}{left_out}"}),
        **({"Seed": seeds} if len(comparison.seeds) == 1 else {"Seeds": f"{len(comparison.seeds)} ({seeds})"}),
        "Baseline": comparison.labels.get(comparison.baseline, "none"),
        "Model": _model(record),
        **_training(record),
        "Test": f"{comparison.problems} problems, greedy and {rollouts} x {samples} responses each",
        "Duration": _duration(seconds) if comparison.is_one else f"{_duration(seconds)}, all runs",
        "Versions": "; ".join(sorted(versions)),
    }


def _model(record: RunRecord) -> str:
    if setting(record, "model.path"):
        return str(setting(record, "model.path"))
    shown = ("model_type", "num_hidden_layers", "hidden_size")
    return ", ".join(f"{key} {value}" for key, value in setting(record, "model.architecture").items() if key in shown)


def _training(record: RunRecord) -> dict[str, str]:
    if record.config.get("algorithm") == "none":
        return {}
    data = setting(record, "data")
    built_in = setting(record, "data.test") is None and not data.get("source")
    own = data.get("source") or data["train"]
    training = f"{data['arithmetic']['train_problems']} problems of the built-in task" if built_in else own
    prompts, each = setting(record, "grpo.problems_per_iteration"), setting(record, "sampling.samples_per_prompt")
    return {
        "Training": f"{training}, {prompts or 'all'} prompts x {each} responses per iteration",
        "Warm-up": f"{setting(record, 'sft.steps')} supervised steps",
    }


def _settings_number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _verdict(response: Mapping[str, Any] | Group) -> str:
    reward = response.reward if isinstance(response, Group) else response["reward"]
    if reward >= 1:
        return "correct"
    return "incorrect" if reward <= 0 else f"reward {reward:g}"
