"""A comparison's numbers for other programs: its table as CSV, and everything that the page says in numbers as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

from nemo_edo.metrics import Interval
from nemo_edo.report.comparison import Cells, Comparison

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
    matched, labels = comparison.matched, comparison.labels
    rows = {(arm, metric): _row(comparison, arm, metric) for arm in labels for metric in comparison.table[arm]}
    record = {
        "runs": [{"folder": str(record.folder), "seed": record.seed} for record in comparison.runs.records],
        "left_out": {str(folder): reason for folder, reason in comparison.runs.left_out.items()},
        "seeds": comparison.seeds,
        "problems": comparison.problems,
        "baseline": labels.get(comparison.baseline),
        "arms": {labels[arm]: sorted(by_seed) for arm, by_seed in comparison.arms.items()},
        "table": [{**row, "by_seed": comparison.table[arm][metric].by_seed} for (arm, metric), row in rows.items()],
        "matched": {
            "accuracies": matched.accuracies,
            "values": _matched(comparison, matched.values),
            "differences": _matched(comparison, matched.differences),
            "left_out": {labels[arm]: reasons for arm, reasons in matched.left_out.items()},
        },
        "conclusions": conclusions,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    table = pd.DataFrame(list(rows.values()), columns=COLUMNS, dtype=object)
    return {".csv": table.to_csv(index=False, lineterminator="\r\n"), ".json": text + "\n"}


def _row(comparison: Comparison, arm: str, metric: str) -> dict[str, Any]:
    """The row of ``COLUMNS``; None in what was not measured."""
    cell, difference = comparison.table[arm][metric], comparison.difference(arm, metric)
    row = {"arm": comparison.labels[arm], "metric": metric, "seeds": len(cell.by_seed), **_ends(cell.interval)}
    if difference is not None:
        apart, problems = _ends(difference.interval), difference.over_problems
        row |= {
            **{"difference": apart["mean"], "difference_low": apart["low"], "difference_high": apart["high"]},
            **{"common_seeds": len(difference.by_seed), "problems_low": problems.low, "problems_high": problems.high},
            **{"p_value": _finite(difference.p_value), "p_holm": _finite(difference.p_adjusted)},
            **{"noise": comparison.noise.get(metric), "baseline": comparison.labels[comparison.baseline]},
        }
    return dict.fromkeys(COLUMNS) | row


def _matched(comparison: Comparison, cells: Cells) -> dict[str, dict[str, Any]]:
    return {
        measure: {
            comparison.labels[arm]: {**_ends(cell.interval), "by_seed": cell.by_seed} for arm, cell in by_arm.items()
        }
        for measure, by_arm in cells.items()
    }


def _ends(interval: Interval) -> dict[str, float | None]:
    """The ends are None where one seed leaves them open."""
    return {name: _finite(getattr(interval, name)) for name in ("mean", "low", "high")}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
