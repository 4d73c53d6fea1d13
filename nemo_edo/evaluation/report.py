"""One self-contained HTML file for a run: no request leaves the page, whatever the responses in it contain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from nemo_edo.errors import UserError
from nemo_edo.evaluation.case_study import Group, case_study
from nemo_edo.evaluation.charts import all_charts
from nemo_edo.evaluation.comparison import Comparison, main_metrics, metric_name
from nemo_edo.evaluation.conclusions import conclusions, direction
from nemo_edo.evaluation.run_record import RunRecord, compare_run, read_run, setting
from nemo_edo.evaluation.search_tree import read_trees

TEMPLATES = Path(__file__).parent / "templates"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Read the run folder and write its report to ``out``, by default ``report.html`` in it; returns the path.

    Raises UserError naming the file, and the line or key, where an input is missing or malformed.
    """
    record = read_run(run_folder)
    comparison = compare_run(record)
    path = html_path(out) if out else run_folder / "report.html"
    path.write_text(render(record, comparison), encoding="utf-8")
    return path


def html_path(out: Path) -> Path:
    """The report's path, its folder made. Raises UserError where it cannot be one."""
    if out.suffix != ".html":
        raise UserError(f"{out}: a report's file ends in .html")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out.parent} cannot be made ({error.strerror})") from error
    return out


def render(record: RunRecord, comparison: Comparison) -> str:
    """The page. Everything is escaped except plotly's own script and the charts that plotly wrote."""
    charts, undrawn = all_charts(record, comparison)
    main = main_metrics(comparison.metrics)
    return render_page(
        "report.html.j2",
        record=record,
        comparison=comparison,
        facts=_facts(record, comparison),
        conclusions=conclusions(comparison),
        main_metrics=main,
        shown_metrics=[*main, *(m for m in comparison.metrics if m in ("well_formed", "response_length"))],
        charts=charts,
        undrawn=undrawn,
        labels=comparison.labels,
        case=case_study(record),
        trees=read_trees(record.folder),
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
        "reading": _reading,
    }
    return environment.get_template(template).render(plotly_js=Markup(get_plotlyjs()), Markup=Markup, **values)


def _facts(record: RunRecord, comparison: Comparison) -> dict[str, str]:
    """What was run, and on how much of what."""
    data, architecture = setting(record, "data"), setting(record, "model.architecture")
    if setting(record, "model.path"):
        model = str(setting(record, "model.path"))
    else:
        model = ", ".join(
            f"{key} {value}"
            for key, value in architecture.items()
            if key in ("model_type", "num_hidden_layers", "hidden_size")
        )
    built_in = setting(record, "data.test") is None
    training = f"{data['arithmetic']['train_problems']} problems of the built-in task" if built_in else data["train"]
    some, each = setting(record, "grpo.problems_per_iteration"), setting(record, "sampling.samples_per_prompt")
    collection = f"{each} responses to {f'{some} of them' if some else 'each'} an iteration"
    samples, rollouts = setting(record, "evaluation.samples"), setting(record, "evaluation.rollouts")
    trained = {
        "Training": f"{training}, {collection}",
        "Warm-up": f"{setting(record, 'sft.steps')} supervised steps",
    }
    return {
        "Seed": str(record.summary["seed"]),
        "Model": model,
        **(trained if record.config.get("algorithm") != "none" else {}),
        "Test": f"{comparison.problems} problems, greedy and {rollouts} x {samples} responses each",
        "Duration": _duration(record.summary["time"]["total_s"]),
        "Versions": ", ".join(f"{name} {version}" for name, version in record.summary["versions"].items()),
    }


def _settings_number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _reading(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _verdict(response: Mapping[str, Any] | Group) -> str:
    reward = response.reward if isinstance(response, Group) else response["reward"]
    if reward >= 1:
        return "correct"
    return "incorrect" if reward <= 0 else f"reward {reward:g}"
