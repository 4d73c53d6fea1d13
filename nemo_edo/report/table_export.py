"""A comparison's numbers for other programs: its table as CSV, and everything that the page says in numbers as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

from nemo_edo.metrics import Interval
from nemo_edo.report.comparison import Comparison

COLUMNS = (
    *("arm", "metric", "seeds", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "common_seeds"),
    *("problems_low", "problems_high", "p_value", "p_holm", "detectable", "noise", "baseline"),
)
"""Columns of the CSV file: low and high are the ends of 95 % intervals over seeds (of one run over problems),
problems_low and problems_high those of the paired interval over problems. p_value is of a paired t test over seeds,
p_holm corrected for all of them; detectable is the least true difference that such a test, at the level of the
strictest, finds with probability 0.8; noise is the distance between the baseline and its replicate."""


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
    rows = [{key: _as_text(value) for key, value in row.items()} for row in rows]
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    csv = pd.DataFrame(rows, columns=COLUMNS, dtype=object).to_csv(index=False, lineterminator="\r\n")
    return {".csv": csv, ".json": text + "\n"}


def _as_text(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


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
