"""A table of the paper joined with measured runs, as Markdown, CSV or one self-contained HTML file:

python -m tools.paper_tables.tables main runs/main_s1k_qwen_grpo 'runs/ood_*' -o tables/main.html
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import START, ratio_intervals, seeds_interval
from nemo_edo.metrics import Interval, intervals
from nemo_edo.report.page import render_page, write_whole
from nemo_edo.report.run_folders import FoundRuns, find_runs
from nemo_edo.report.run_set import RunRecord, Trained, read_run, setting
from tools.paper_tables.published import (
    OUT_OF_DISTRIBUTION,
    OVERALL,
    ROW,
    TABLES,
    evaluated_on,
    measured_by,
    published,
    read_texts,
)
from tools.paper_tables.settings import departures, tested_on

NOT_RUN, NOT_MEASURED = "not run", "not measured"
SEARCHED = {"searchllm": "cot"}
"""The search is with the policy of another row."""
CSV = ["table", *ROW, "column", "paper", "paper_deviation", "mean", "low", "high", "deviation", "seeds", "state"]


@dataclass(frozen=True)
class PaperTable:
    name: str
    lines: pd.DataFrame
    """``CSV`` and percent: each number of the paper with the measured one, in the column's unit. The interval is over
    problems with one seed, over seeds (Student's t) with several; deviation is the standard deviation over seeds
    (n - 1). state says why nothing is measured."""
    runs: list[str]
    """The runs that measure a row: folder, seed and model."""
    left_out: list[str]
    """Runs and arms that measure no row, with the reason."""


def build_table(name: str, records: Sequence[RunRecord], left_out: Mapping[Path, str] | None = None) -> PaperTable:
    """The table of that name (a key of ``TABLES``) with what the runs measured.

    Raises UserError where two runs measured the same row with one seed.
    """
    found: dict[tuple, dict[int, Trained]] = {}
    runs: dict[str, None] = {}
    unused = [f"{folder}: {reason}" for folder, reason in (left_out or {}).items()]
    for record, arm in [(one, arm) for one in records for arm in one.evaluations]:
        reasons, measures = departures(record, arm), measured_by(record.config.get("experiment"), arm)
        if not reasons and name not in (tables := measures["tables"].item().split()):
            reasons = [f"{record.config['experiment']} is for the tables {', '.join(tables)}"]
        if reasons:
            unused.append(f"{record.folder}, {record.label(arm)}: {', '.join(reasons)}")
            continue
        [row] = measures[ROW].itertuples(index=False)
        row = row._replace(evaluated_on=evaluated_on(tested_on(record), row.trained_on))
        first = found.setdefault(tuple(row), {}).setdefault(record.seed, Trained(record, arm))
        # Only the start of runs with arms may be there twice: they share it, and the first counts.
        if (first.record is not record or first.name != arm) and not (arm == START and record.arms):
            raise UserError(
                f"{first.record.folder} and {record.folder} both measured {row.method} on {row.evaluated_on} with "
                f"seed {record.seed}: a seed counts once, so name one of them only"
            )
        model = setting(record, "model.path") or "built-in model"
        runs[f"{record.folder} (seed {record.seed}, {model})"] = None
    paper = published(name)
    measured = pd.DataFrame([_measured(number, found) for number in paper.itertuples()], index=paper.index)
    lines = paper.rename(columns={"value": "paper", "spread": "paper_deviation"}).join(measured)
    return PaperTable(name, lines[[*CSV, "percent"]], list(runs), unused)


def _measured(number: Any, found: Mapping[tuple, Mapping[int, Trained]]) -> dict[str, Any]:
    """mean, low, high, deviation, seeds and state for one number of the paper."""
    method = SEARCHED.get(number.method, number.method)
    benchmarks = OUT_OF_DISTRIBUTION if number.evaluated_on == OVERALL else (number.evaluated_on,)
    parts = [found.get((number.backbone, number.trained_on, tested, method), {}) for tested in benchmarks]
    seeds = sorted(set.intersection(*map(set, parts)))
    by_seed = {seed: one for seed in seeds if (one := _of_one_seed(number, [part[seed] for part in parts]))}
    measured = {**dict.fromkeys(("mean", "low", "high", "deviation"), math.nan), "seeds": "", "state": ""}
    if not by_seed:
        run = sum(map(bool, parts))
        state = NOT_RUN if not run else f"{run} of {len(parts)} benchmarks" if run < len(parts) else NOT_MEASURED
        return {**measured, "state": state}
    factor = 100.0 if number.percent else 1.0
    means = [one.mean * factor for one in by_seed.values()]
    measured["seeds"] = " ".join(map(str, by_seed))
    if len(means) > 1:
        found_in = [part[seed].evaluation for seed in by_seed for part in parts]
        names = [name for name in number.metrics.split() if all(one.has(name) for one in found_in)]
        grain = max((one.grain(name) for name in names[:1] for one in found_in), default=0.0) / len(parts)
        over_seeds = seeds_interval(
            number.metrics.split()[0], [one.mean for one in by_seed.values()], rounding=grain**2 / 12
        )
        ends = {name: end * factor for name, end in vars(over_seeds).items()}
        return {**measured, **ends, "deviation": float(np.std(means, ddof=1))}
    [one] = by_seed.values()
    return {**measured, "mean": means[0], "low": one.low * factor, "high": one.high * factor}


def _of_one_seed(number: Any, policies: Sequence[Trained]) -> Interval | None:
    """The number as a share, with its interval. policies: one for each benchmark."""
    names, record = number.metrics.split(), policies[0].record
    if not math.isnan(number.iteration):  # an evaluation made anew replaces the one before
        lines = policies[0].lines("evaluation")
        logged = lines.loc[lines["iteration"] == number.iteration, "metrics"]
        values = [metrics[name] for metrics in logged for name in names if name in metrics]
        ends = [values[-1].get(key) for key in ("mean", "low", "high")] if values else []
        return Interval(*(math.nan if end is None else end for end in ends)) if ends else None
    pairs = []
    for policy in policies:
        metrics = {**(policy.test_time.metrics if policy.test_time else {}), **policy.evaluation.metrics}
        name = next((name for name in names if name in metrics and metrics[name][1].sum() > 0), None)
        if name is None:
            return None
        pairs.append((name, metrics[name]))
    settings = {"resamples": setting(record, "evaluation.bootstrap"), "seed": record.seed}
    if len(pairs) == 1:
        return ratio_intervals(dict(pairs), **settings)[pairs[0][0]]
    return mean_of_shares([pair for _, pair in pairs], **settings)


def mean_of_shares(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, resamples: int, seed: int) -> Interval:
    """The plain mean of sum(sums) / sum(counts) over separate sets of problems, such as benchmarks, with its 95 %
    interval: the weights of one set are independent of the others'. Otherwise ``share_interval``."""
    ends = [intervals._weighted([one], resamples, [seed, place]) for place, one in enumerate(pairs)]
    lower_R, upper_R = (np.mean(found, axis=0)[0] for found in zip(*ends, strict=True))
    return intervals._between(
        float(np.mean([sums.sum() / counts.sum() for sums, counts in pairs])), lower_R, upper_R, 0.95
    )


def write_table(found: FoundRuns, name: str, out: Path | None = None) -> list[str]:
    """Builds the table and returns lines for the terminal: the table itself, or the path of ``out``.

    Raises UserError where a run cannot be read, and for a file that does not end in .html, .md or .csv.
    """
    if out is not None and out.suffix not in (".html", ".md", ".csv"):
        raise UserError(f"{out}: a table's file ends in .html, .md, .csv")
    table = build_table(name, [read_run(folder) for folder in found.folders], found.left_out)
    if out is None:
        return [markdown(table)]
    if out.suffix == ".csv":  # a line for each number of the paper
        text = table.lines[CSV].to_csv(index=False, lineterminator="\r\n")
    else:
        text = html(table) if out.suffix == ".html" else markdown(table)
    write_whole(out, text)
    return [f"table: {out}"]


def sections(table: PaperTable) -> list[dict[str, Any]]:
    """The rows of each backbone and benchmark as a reader wants them: title, heads and the texts of each method, a
    column for each quantity, the paper's before the measured: ``79.1 [77.0, 81.3]``, and of several seeds
    ``79.1 ± 0.3 [78.3, 79.8], 3 seeds``."""
    made = []
    for (backbone, trained_on, tested), lines in table.lines.groupby(ROW[:3], sort=False):
        titles, rows = list(lines["column"].unique()), {}
        for line in lines.itertuples():
            form = ".1f" if line.percent else ".4f"
            paper = "" if math.isnan(line.paper) else f"{line.paper:.1f}" if line.percent else f"{line.paper:g}"
            if not math.isnan(line.paper_deviation):
                paper = f"{line.paper:g} ± {line.paper_deviation:g}"
            measured = line.state or f"{line.mean:{form}} [{line.low:{form}}, {line.high:{form}}]"
            if (number := len(line.seeds.split())) > 1:
                measured = f"{measured.replace(' ', f' ± {line.deviation:{form}} ', 1)}, {number} seeds"
            texts = rows.setdefault(line.method, [""] * (2 * len(titles)))
            place = 2 * titles.index(line.column)
            texts[place : place + 2] = paper, measured
        heads = ["method", *(f"{title}, {source}" for title in titles for source in ("paper", "measured"))]
        title = f"{backbone}, trained on {trained_on}, evaluated on {tested}"
        made.append({"title": title, "heads": heads, "rows": rows})
    return made


def notes(table: PaperTable) -> list[str]:
    """What a reader has to know about the numbers: ``notes.csv``, the runs, and what is not in the table."""
    lines = read_texts("notes.csv").itertuples()
    said = [line.note for line in lines if line.tables == "*" or table.name in line.tables.split()]
    runs, unused = (f"Run: {run}" for run in table.runs), (f"Not in the table: {run}" for run in table.left_out)
    return [*said, *runs, *unused]


def markdown(table: PaperTable) -> str:
    """The table for a terminal or a page of text."""
    lines = [f"# {TABLES[table.name]}", ""]
    for section in sections(table):
        heads = section["heads"]
        lines += [f"## {section['title']}", "", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        lines += [f"| {' | '.join((method, *texts))} |" for method, texts in section["rows"].items()] + [""]
    plain = (" ".join(note.split()).replace("|", "\\|").replace("<", "&lt;") for note in notes(table))
    return "\n".join([*lines, *(f"- {note}" for note in plain)]) + "\n"


def html(table: PaperTable) -> str:
    """The page. Everything in it is escaped."""
    return render_page("table.html.j2", title=TABLES[table.name], sections=sections(table), notes=notes(table))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("runs", nargs="+", help="run folders, folders of runs, or patterns of them")
    parser.add_argument("-o", "--out", type=Path, help="OUT.html, OUT.md or OUT.csv; default: the terminal")
    args = parser.parse_args(arguments)
    try:
        print(*write_table(find_runs(args.runs), args.table, args.out), sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
