"""Several runs as one self-contained HTML file, with its table as CSV and JSON beside it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from nemo_edo.evaluation.comparison import main_metrics
from nemo_edo.evaluation.report import html_path, render_page
from nemo_edo.evaluation.run_set import FoundRuns, RunSet, read_runs
from nemo_edo.evaluation.runs_charts import runs_charts
from nemo_edo.evaluation.runs_comparison import OverSeeds, RunsComparison, SeedDifference, compare_runs
from nemo_edo.evaluation.runs_conclusions import count, runs_conclusions
from nemo_edo.metrics import Interval

COLUMNS = (
    *("arm", "metric", "seeds", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "common_seeds"),
    *("problems_low", "problems_high", "p_value", "p_holm", "baseline"),
)
"""Of the CSV file: low and high are ends of 95 % intervals over seeds, those of problems of the paired bootstrap."""


def write_runs_report(found: FoundRuns, out: Path | None = None, baseline: str | None = None) -> list[str]:
    """Writes OUT.html, OUT.csv and OUT.json; returns the conclusions and the file's path, as lines for the terminal.

    out: None for ``report.html`` in the folder that the runs have in common. Raises UserError where runs cannot be
    compared or read, for an unknown baseline, and for a file that is not named ``.html`` or cannot be written.
    """
    path = html_path(out or found.common / "report.html")
    runs = read_runs(found)
    comparison = compare_runs(runs, baseline)
    path.write_text(render(runs, comparison, path.parent.name or "runs"), encoding="utf-8")
    rows = table_rows(comparison)
    with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    record = json_record(runs, comparison, rows)
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    return [*(f"- {sentence}" for sentence in runs_conclusions(comparison, runs.left_out)), f"report: {path}"]


def render(runs: RunSet, comparison: RunsComparison, title: str) -> str:
    """The page. Everything is escaped except plotly's own script and the charts that plotly wrote."""
    charts, undrawn = runs_charts(comparison)
    main = main_metrics(comparison.metrics)
    return render_page(
        "runs_report.html.j2",
        title=title,
        comparison=comparison,
        records=runs.records,
        left_out=runs.left_out,
        facts=_facts(runs, comparison),
        conclusions=runs_conclusions(comparison, runs.left_out),
        main_metrics=main,
        shown_metrics=[*main, *(m for m in comparison.metrics if m in ("well_formed", "response_length"))],
        charts=charts,
        undrawn=undrawn,
    )


def table_rows(comparison: RunsComparison) -> list[dict[str, Any]]:
    """A row of ``COLUMNS`` for each arm and metric; None where there is no number."""
    rows = []
    for arm, by_metric in comparison.table.items():
        for metric, cell in by_metric.items():
            if cell is not None:
                row = {"arm": arm, "metric": metric, "seeds": len(cell.by_seed), **_interval(cell.interval)}
                rows.append({**dict.fromkeys(COLUMNS), **row, **_difference(comparison, arm, metric)})
    return rows


def json_record(runs: RunSet, comparison: RunsComparison, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page says in numbers: the table's rows with the value of each seed, and the comparison at matched
    accuracy."""
    matched = comparison.matched
    return {
        "runs": [{"folder": str(record.folder), "seed": record.summary["seed"]} for record in runs.records],
        "left_out": {str(folder): reason for folder, reason in runs.left_out.items()},
        "seeds": comparison.seeds,
        "problems": comparison.problems,
        "baseline": comparison.baseline,
        "arms": {arm: sorted(by_seed) for arm, by_seed in comparison.arms.items()},
        "table": [{**row, "by_seed": comparison.table[row["arm"]][row["metric"]].by_seed} for row in rows],
        "matched": {
            "accuracies": matched.accuracies,
            "values": _matched(matched.values),
            "differences": _matched(matched.differences),
            "left_out": matched.left_out,
        },
        "conclusions": runs_conclusions(comparison, runs.left_out),
    }


def _facts(runs: RunSet, comparison: RunsComparison) -> dict[str, str]:
    left_out = f", {len(runs.left_out)} left out" if runs.left_out else ""
    return {
        "Runs": f"{comparison.runs}{left_out}",
        "Seeds": f"{len(comparison.seeds)} ({', '.join(map(str, comparison.seeds))})",
        "Arms": count(len(comparison.arms), "trained arm"),
        "Baseline": comparison.baseline or "none",
        "Test": f"{comparison.problems} problems",
    }


def _difference(comparison: RunsComparison, arm: str, metric: str) -> dict[str, Any]:
    difference: SeedDifference | None = comparison.difference(arm, metric)
    if difference is None:
        return {}
    apart = _interval(difference.over_seeds.interval)
    return {
        "difference": apart["mean"],
        "difference_low": apart["low"],
        "difference_high": apart["high"],
        "common_seeds": len(difference.over_seeds.by_seed),
        "problems_low": difference.over_problems.low,
        "problems_high": difference.over_problems.high,
        "p_value": difference.p_value,
        "p_holm": difference.p_adjusted,
        "baseline": comparison.baseline,
    }


def _matched(values: dict[str, dict[str, OverSeeds]]) -> dict[str, dict[str, Any]]:
    return {
        measure: {arm: {**_interval(cell.interval), "by_seed": cell.by_seed} for arm, cell in by_arm.items()}
        for measure, by_arm in values.items()
    }


def _interval(interval: Interval) -> dict[str, float | None]:
    """The ends are None where one seed leaves them open."""
    ends = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}
