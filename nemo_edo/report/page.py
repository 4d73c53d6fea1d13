"""The report of a run or of several: one self-contained HTML file, its table as CSV, and its numbers as JSON.

No request leaves the page, whatever the responses in it contain.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nemo_edo.config.run import ALGORITHMS
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import POOLED, main_metrics, metric_name, plain_name
from nemo_edo.metrics import Interval
from nemo_edo.report.charts import all_charts
from nemo_edo.report.comparison import Comparison, compare
from nemo_edo.report.conclusions import conclusions, direction, short_name, terminal_table
from nemo_edo.report.plotting import DASHES, SYMBOLS
from nemo_edo.report.run_set import RunSet, arm_settings, setting
from nemo_edo.report.sample_browser import read_trees, sample_browser
from nemo_edo.utils.files import write_text
from nemo_edo.utils.phases import PHASES

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY = Path(__file__).parent / "vendor" / "plotly-basic.min.js"
"""Plotly's partial bundle of scatter, bar and pie charts (npm's plotly.js-basic-dist-min 4.1.1): a quarter of the whole
that the Python package has."""
COLUMNS = (
    *("arm", "metric", "seeds", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "common_seeds"),
    *("problems_low", "problems_high", "p_value", "p_holm", "detectable", "noise", "baseline"),
)
"""Columns of the CSV file: low and high are the ends of 95 % intervals over seeds (of one run over problems),
problems_low and problems_high those of the paired interval over problems. p_value is of a paired t test over seeds,
p_holm corrected for all of them; detectable is the least true difference that such a test, at the level of the
strictest, finds with probability 0.8; noise is the distance between the baseline and its replicate."""
SHOWN_S = 0.1


@dataclass(frozen=True)
class Report:
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
    for suffix, first in {".json": '{\n "runs": [', ".csv": ",".join(COLUMNS[:2])}.items():
        other = path.with_suffix(suffix)
        if other.is_file() and not other.read_bytes().startswith(first.encode()):
            raise UserError(f"{other} would be replaced, and no report has written it: choose another --out")
    comparison = compare(found, baseline)
    said = conclusions(comparison)
    texts = {".html": render(comparison, said, title=path.parent.name or "runs"), **numbers(comparison, said)}
    for suffix, text in texts.items():
        write_whole(path.with_suffix(suffix), text)
    if comparison.is_one and out is None:
        write_whole(path.with_name("results.json"), results(comparison))
    return Report(path, comparison, said)


def write_whole(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def render(comparison: Comparison, said: list[str], title: str) -> str:
    """The page. title: of several runs; one has its name. Everything is escaped except plotly's own script and the
    charts that plotly wrote."""
    runs, main = comparison.runs, main_metrics(comparison.metrics)
    first = [metric for metric in main if metric not in ("accuracy", POOLED)]
    run = runs.records[0] if comparison.is_one else None
    return render_page(
        "report.html.j2",
        title=run.summary["name"] if run else title,
        run=run,
        records=runs.records,
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
        differing=differing_settings(runs),
        phases=phases(runs),
        trees=read_trees(run.folder) if run else [],
        plotly_js=Markup(PLOTLY.read_text(encoding="utf-8")),
    )


def render_page(template: str, **values: Any) -> str:
    """A page of ``templates/``; whatever text is put into it is escaped."""
    loader = FileSystemLoader(TEMPLATES)
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, **options)
    named = (metric_name, plain_name, short_name, direction, duration)
    environment.filters |= {function.__name__: function for function in named}
    environment.filters |= {"dash_array": DASHES.get, "symbol_path": SYMBOLS.get}
    return environment.get_template(template).render(Markup=Markup, **values)


# --- what the page says besides results: what was run, on what, how long, and how the arms differ ---------------------


def headline(comparison: Comparison) -> list[str]:
    """The facts under the page's name: seeds, date, commit, machine, duration, size. Older runs lack some."""
    records, seeds = comparison.runs.records, comparison.seeds
    dates = sorted(record.summary["date"][:16].replace("T", " ") for record in records if "date" in record.summary)
    commits, machines = (
        ", ".join(dict.fromkeys(filter(None, (record.summary.get(key) for record in records))))
        for key in ("commit", "machine")
    )
    said = [
        "" if comparison.is_one else f"{len(records)} runs",
        f"{len(comparison.runs.left_out)} left out" if comparison.runs.left_out else "",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))} UTC" if dates else "",
        f"commit {commits}" if commits else "",
        machines,
        duration(sum(record.summary["time"]["total_s"] for record in records)),
        f"{comparison.problems} test problems",
    ]
    return [fact for fact in said if fact]


def facts(comparison: Comparison) -> dict[str, str]:
    """What was run, and on how much data. Comparable runs share their data, model, warm-up and evaluation."""
    records, first = comparison.runs.records, comparison.runs.records[0]
    found = {"Baseline": comparison.labels.get(comparison.baseline, "none"), "Model": setting(first, "model.path")}
    if not found["Model"]:
        shown, architecture = ("model_type", "num_hidden_layers", "hidden_size"), setting(first, "model.architecture")
        found["Model"] = ", ".join(f"{key} {value}" for key, value in architecture.items() if key in shown)
    if first.config.get("algorithm") != "none":
        data = setting(first, "data")
        training = data.get("source") or data["train"]
        if setting(first, "data.test") is None and not data.get("source"):
            training = f"{data['arithmetic']['train_problems']} problems of the built-in task"
        if (section := setting(first, "algorithm")) in ALGORITHMS:
            keys = (f"{section}.problems_per_iteration", "sampling.samples_per_prompt")
            prompts, each = (setting(first, key) for key in keys)
            training += f", {prompts or 'all'} prompts x {each} responses per iteration"
        found["Training"] = training
        found["Warm-up"] = f"{setting(first, 'sft.steps')} supervised steps"
    stopped = [
        f"{comparison.labels.get(name, about['label'])}"
        f"{'' if comparison.is_one else f' (seed {record.seed})'} {about['stopped_early']}"
        for record in records
        for name, about in record.summary["arms"].items()
        if "stopped_early" in about
    ]
    if stopped:
        found["Stopped early"] = "; ".join(stopped)
    if changed := [sentence for record in records for sentence in record.changed]:
        found["Changed inputs"] = "; ".join(changed)
    evaluated = next(iter(first.evaluations.values()))  # perhaps again, with other settings than the run's
    samples, rollouts = evaluated.samples, setting(first, "evaluation.rollouts")
    if samples is None:
        samples = setting(first, "evaluation.samples")
    elif evaluated.has("well_formed"):
        rollouts = round(evaluated.metrics["well_formed"][1].max() / samples)
    sampled = f"{rollouts} x {samples} responses each at temperature {comparison.temperature:g}"
    found["Test"] = f"{comparison.problems} problems, greedy and {sampled}"
    versions = {f"{name} {version}": None for one in records for name, version in one.summary["versions"].items()}
    return {**found, "Versions": ", ".join(versions)}


def differing_settings(runs: RunSet) -> dict[str, list[str]]:
    """Setting -> its value in each arm, of the settings in which arms differ; "" where an arm's algorithm lacks it."""
    trained = [by_seed[min(by_seed)] for by_seed in runs.arms.values()]
    of_arms = [
        {key: f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
         for key, value in arm_settings(one.record, one.name).items()}
        for one in trained
    ]  # fmt: skip
    keys = dict.fromkeys(key for settings in of_arms for key in settings)
    values = {key: [settings.get(key, "") for settings in of_arms] for key in keys}
    return {key: by_arm for key, by_arm in values.items() if len(set(by_arm)) > 1}


def phases(runs: RunSet) -> list[tuple[str, float]]:
    """(phase, seconds) of all runs together, the longest first; nothing of runs whose lines have no phases."""
    seconds: Counter[str] = Counter()
    for clocks in (clocks for record in runs.records for clocks in record.lines.query("kind == 'phases'")["time"]):
        named = {phase: clocks.get(f"{phase}_s", 0.0) for phase in PHASES}
        seconds.update({**named, "without a name": clocks["wall_s"] - sum(named.values())})
    return [(phase.replace("_", " "), spent) for phase, spent in seconds.most_common() if spent >= SHOWN_S]


def markdown_table(comparison: Comparison, metrics: list[str]) -> str:
    rows = [["arm", *map(metric_name, metrics)], ["---"] * (len(metrics) + 1)]
    for arm, label in comparison.labels.items():
        rows.append([" ".join(label.split()).replace("|", "\\|").replace("<", "&lt;")])  # no markup of Markdown
        for cell in (comparison.cell(arm, metric) for metric in metrics):
            ends = f" [{cell.interval.low:.3f}, {cell.interval.high:.3f}]" if cell and cell.known else ""
            rows[-1].append(f"{cell.interval.mean:.3f}{ends}" if cell else "")
    if comparison.replicate:
        noise = comparison.noise
        rows.append(["noise of training", *(f"±{noise[m]:.3f}" if m in noise else "" for m in metrics)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


# --- the numbers for other programs -----------------------------------------------------------------------------------


def numbers(comparison: Comparison, conclusions: list[str]) -> dict[str, str]:
    """The text of the CSV and of the JSON file, by suffix. None, or nothing, stands for what was not measured."""
    runs, matched, labels = comparison.runs, comparison.matched, comparison.labels
    rows, table = [], []
    for arm, label in labels.items():
        for metric, cell in comparison.table[arm].items():
            row = {"arm": label, "metric": metric, "seeds": len(cell.by_seed), **_ends(cell.interval)}
            if difference := comparison.difference(arm, metric):
                apart, problems = _ends(difference.interval), difference.over_problems
                row |= {
                    **{"difference": apart["mean"], "difference_low": apart["low"], "difference_high": apart["high"]},
                    **{"common_seeds": len(difference.by_seed), "noise": comparison.noise.get(metric)},
                    **{"problems_low": problems.low, "problems_high": problems.high},
                    **{"p_value": _finite(difference.p_value), "p_holm": _finite(difference.p_adjusted)},
                    "detectable": _finite(difference.detectable),
                    "baseline": labels[comparison.baseline],
                }
            rows.append(dict.fromkeys(COLUMNS) | row)
            table.append({**rows[-1], "by_seed": cell.by_seed})
    of_measures = [
        {
            measure: {labels[arm]: {**_ends(cell.interval), "by_seed": cell.by_seed} for arm, cell in by_arm.items()}
            for measure, by_arm in cells.items()
        }
        for cells in (matched.values, matched.differences)
    ]
    record = {
        "runs": [{"folder": str(record.folder), "seed": record.seed} for record in runs.records],
        "left_out": {str(folder): reason for folder, reason in runs.left_out.items()},
        "seeds": comparison.seeds,
        "problems": comparison.problems,
        "baseline": labels.get(comparison.baseline),
        "arms": {labels[arm]: sorted(by_seed) for arm, by_seed in comparison.arms.items()},
        "table": table,
        "matched": {
            "accuracies": matched.accuracies,
            "values": of_measures[0],
            "differences": of_measures[1],
            "left_out": {labels[arm]: reasons for arm, reasons in matched.left_out.items()},
        },
        "conclusions": conclusions,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    frame = frame.replace(r"^(?=[=+\-@\t\r])", "'", regex=True)  # a spreadsheet would take it for a formula
    return {".csv": frame.to_csv(index=False, lineterminator="\r\n"), ".json": text + "\n"}


def results(comparison: Comparison) -> str:
    """The text of a run's results.json: a row for each arm and metric, with its value, its 95 % interval over problems
    and the number of problems that it was measured on."""
    rows = []
    for arm, label in comparison.labels.items():
        [trained] = comparison.runs.policies[arm].values()
        metrics = {**trained.evaluation.metrics, **(trained.test_time.metrics if trained.test_time else {})}
        for metric, cell in comparison.table[arm].items():
            ends = _ends(cell.interval)
            measured = int((metrics[metric][1] > 0).sum()) if metric in metrics else comparison.problems
            rows.append({"arm": label, "metric": metric, "value": ends.pop("mean"), **ends, "n": measured})
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    return f"[{lines}]\n"


def _ends(interval: Interval) -> dict[str, float | None]:
    """The ends are None where one seed leaves them open."""
    return {name: _finite(end) for name, end in vars(interval).items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
