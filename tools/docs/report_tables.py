"""A report of several runs as Markdown tables, from its JSON file.

    nemo-edo report runs/seeds
    python tools/docs/report_tables.py runs/seeds/report.json

Means over seeds with Student's t intervals, the seeds' own values, differences from the baseline paired by seed, and
the values at matched accuracy. In the table of differences a star marks p-values over seeds (paired t test) below 0.05
after Holm's correction over all differences.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nemo_edo.evaluation.results import main_metrics, metric_name

Row = dict[str, Any]


def tables(report: Row) -> list[str]:
    cells = {(row["arm"], row["metric"]): row for row in report["table"]}
    arms = list(dict.fromkeys(row["arm"] for row in report["table"]))
    metrics = main_metrics(list(dict.fromkeys(row["metric"] for row in report["table"])))
    names = [metric_name(metric) for metric in metrics]
    means = [[arm, *(interval(cells.get((arm, metric))) for metric in metrics)] for arm in arms]
    seeds = [
        [arm, str(seed), *(seed_value(cells.get((arm, metric)), seed) for metric in metrics)]
        for arm in arms
        for seed in report["seeds"]
    ]
    apart = [
        [arm, *(difference(cells.get((arm, metric))) for metric in metrics)]
        for arm in report["arms"]
        if arm != report["baseline"]
    ]
    return [
        markdown(["arm", *names], means),
        markdown(["arm", "seed", *names], seeds),
        markdown([f"minus {report['baseline']}", *names], apart),
        *matched(report["matched"], list(report["arms"])),
    ]


def matched(found: Row, arms: list[str]) -> list[str]:
    measures = list(found["values"])
    values = [[arm, *(interval(found["values"][measure].get(arm)) for measure in measures)] for arm in arms]
    apart = [
        [arm, *(interval(found["differences"][measure].get(arm), "+.3f") for measure in measures)]
        for arm in arms
        if any(arm in found["differences"][measure] for measure in measures)
    ]
    names = [metric_name(measure) for measure in measures]
    return [
        markdown(["at matched accuracy", *names], values),
        markdown(["at matched accuracy, minus the baseline", *names], apart),
    ]


def interval(cell: Row | None, form: str = ".3f") -> str:
    if cell is None or cell["mean"] is None:
        return ""
    ends = "" if cell["low"] is None else f" [{cell['low']:{form}}, {cell['high']:{form}}]"
    return f"{cell['mean']:{form}}{ends}"


def seed_value(cell: Row | None, seed: int) -> str:
    return f"{cell['by_seed'][str(seed)]:.3f}" if cell and str(seed) in cell["by_seed"] else ""


def difference(cell: Row | None) -> str:
    if cell is None or cell["difference"] is None:
        return ""
    ends = {"mean": cell["difference"], "low": cell["difference_low"], "high": cell["difference_high"]}
    return interval(ends, "+.3f") + ("*" if cell["p_holm"] is not None and cell["p_holm"] < 0.05 else "")


def markdown(names: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (names, ["---"] * len(names), *rows))


if __name__ == "__main__":
    print("\n\n".join(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
