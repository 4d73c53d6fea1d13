"""A comparison's numbers for other programs: its table as CSV, and everything that the page says in numbers as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from nemo_edo.metrics import Interval
from nemo_edo.report.comparison import Comparison, Estimate

COLUMNS = (
    *("arm", "metric", "seeds", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "common_seeds"),
    *("problems_low", "problems_high", "p_value", "p_holm", "noise", "baseline"),
)
"""Columns of the CSV file: low and high are the ends of 95 % intervals over seeds (of one run over problems),
problems_low and problems_high those of the paired interval over problems. p_value is of a paired t test over seeds,
p_holm corrected for all of them; noise is the distance between the baseline and its replicate."""


def numbers(comparison: Comparison, conclusions: list[str]) -> dict[str, str]:
    """The text of the CSV and of the JSON file, by suffix."""
    rows, file = table_rows(comparison), io.StringIO(newline="")
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(row for _, _, row in rows)
    text = json.dumps(_record(comparison, conclusions, rows), indent=1, ensure_ascii=False, allow_nan=False)
    return {".csv": file.getvalue(), ".json": text + "\n"}


def table_rows(comparison: Comparison) -> list[tuple[str, str, dict[str, Any]]]:
    """(arm, metric, row of ``COLUMNS``); None in a row that was not measured."""
    return [
        (arm, metric, dict.fromkeys(COLUMNS) | _row(comparison, arm, metric, cell))
        for arm, by_metric in comparison.table.items()
        for metric, cell in by_metric.items()
        if cell is not None
    ]


def _row(comparison: Comparison, arm: str, metric: str, cell: Estimate) -> dict[str, Any]:
    row = {"arm": comparison.labels[arm], "metric": metric, "seeds": len(cell.by_seed), **_ends(cell.interval)}
    difference = comparison.difference(arm, metric)
    if difference is None:
        return row
    apart = _ends(difference.interval)
    return row | {
        "difference": apart["mean"],
        "difference_low": apart["low"],
        "difference_high": apart["high"],
        "common_seeds": len(difference.by_seed),
        "problems_low": difference.over_problems.low,
        "problems_high": difference.over_problems.high,
        "p_value": _finite(difference.p_value),
        "p_holm": _finite(difference.p_adjusted),
        "noise": comparison.replicate.noise.get(metric) if comparison.replicate else None,
        "baseline": comparison.labels[comparison.baseline],
    }


def _record(
    comparison: Comparison, conclusions: list[str], rows: list[tuple[str, str, dict[str, Any]]]
) -> dict[str, Any]:
    """The table's rows with the value of each seed, and the comparison at matched accuracy."""
    matched, labels = comparison.matched, comparison.labels
    return {
        "runs": [{"folder": str(record.folder), "seed": record.seed} for record in comparison.runs.records],
        "left_out": {str(folder): reason for folder, reason in comparison.runs.left_out.items()},
        "seeds": comparison.seeds,
        "problems": comparison.problems,
        "baseline": labels.get(comparison.baseline),
        "arms": {labels[arm]: sorted(by_seed) for arm, by_seed in comparison.arms.items()},
        "table": [{**row, "by_seed": comparison.table[arm][metric].by_seed} for arm, metric, row in rows],
        "matched": {
            "accuracies": matched.accuracies,
            "values": _matched(matched.values, labels),
            "differences": _matched(matched.differences, labels),
            "left_out": {labels[arm]: reasons for arm, reasons in matched.left_out.items()},
        },
        "conclusions": conclusions,
    }


def _matched(values: Mapping[str, Mapping[str, Estimate]], labels: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {
        measure: {labels[arm]: {**_ends(cell.interval), "by_seed": cell.by_seed} for arm, cell in by_arm.items()}
        for measure, by_arm in values.items()
    }


def _ends(interval: Interval) -> dict[str, float | None]:
    """The ends are None where one seed leaves them open."""
    return {name: _finite(getattr(interval, name)) for name in ("mean", "low", "high")}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
