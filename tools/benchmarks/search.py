"""SearchLLM compared with best-of-N and votes at equal numbers of sampled tokens: accuracy against tokens.

    python tools/benchmarks/search.py --runs RUN_OF_SEED_1 RUN_OF_SEED_2 --reward-models NAME=FOLDER --out FILE.csv

RUN: from ``nemo-edo evaluate --config-name evaluate``, the same model with different seeds. NAME: the scores that
``nemo-edo score RUN --model FOLDER --name NAME`` gave its responses. A method's numbers are means over the runs,
problem by problem, with 95 % bootstrap intervals over problems. A search is compared with each method at the number of
samples whose mean tokens are closest to its own, paired by problem. Existing searches are reused. Prints a table for
each reward model; FILE.html has the chart.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pyarrow.parquet as pq

from nemo_edo.config.compose import compose_run
from nemo_edo.evaluation.results import START, Evaluation, load_evaluation
from nemo_edo.metrics import paired_share_interval, share_interval
from nemo_edo.report.plotting import COLORS, DASHES, FONT, SYMBOLS
from nemo_edo.run.policy_evaluation import evaluate_stored
from nemo_edo.run.stored_run import open_run
from nemo_edo.search.job import search

RESAMPLES, SEED = 2000, 0
COLUMNS = ("method", "setting", "tokens", "accuracy", "low", "high", "difference", "difference_low", "difference_high")


@dataclass(frozen=True)
class Point:
    """A method with a setting: per problem, the mean over runs of its reward and of its tokens."""

    method: str
    setting: str
    rewards: np.ndarray
    tokens: float


def setting_of(branches: int, width: int, exploration: float) -> str:
    return f"k={branches} s={width} lambda={exploration:g}"


def searched(runs: Sequence[Path], name: str, folder: str, args: argparse.Namespace) -> Iterator[Point]:
    """The searches with one reward model, at every size and exploration."""
    for (branches, width), exploration in itertools.product(args.sizes, args.exploration):
        own = f"{name}_k{branches}_s{width}_l{exploration:g}"
        overrides = [f"search.reward_model={folder}", f"search.name={own}", f"search.branches={branches}",
                     f"search.width={width}", f"search.exploration={exploration}", f"search.steps={args.steps}",
                     "search.part_size=256", *args.overrides]  # fmt: skip
        records = []
        for run in runs:
            if not is_there(run, own, overrides):
                search(open_run(run, overrides), None)
            records.append(pq.read_table(run / "search" / START / own / "results.parquet").to_pydict())
        rewards, tokens = (_mean(records, field) for field in ("reward", "tokens"))
        yield Point(f"SearchLLM/{name}", setting_of(branches, width, exploration), rewards, float(tokens.mean()))


def is_there(run: Path, name: str, overrides: list[str]) -> bool:
    """Whether the run has the whole search of that name with the same settings."""
    summary = run / "search" / START / name / "summary.json"
    wanted = asdict(compose_run("config", overrides, config_dir=run).search)
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["settings"] == wanted


def _mean(records: Sequence[dict[str, list]], field: str) -> np.ndarray:
    """[P] the mean over runs."""
    return np.mean([of_run[field] for of_run in records], axis=0)


def sampled(runs: Sequence[Path], names: Sequence[str], kinds: Sequence[int]) -> Iterator[Point]:
    """What the stored responses give, at each number of them: with a response's score from its last step, the paper's,
    and from its worst step."""
    for how in ("min", "last"):
        for run in runs:
            evaluate_stored([run], None, [f"evaluation.aggregation={how}"])
        found = [load_evaluation(run / "test_time" / f"{START}.json") for run in runs]
        families = {"majority vote": "majority@{k}", "oracle": "best_of@{k}/oracle"} if how == "last" else {}
        suffix = "" if how == "last" else ", worst step"
        for name in names:
            families |= {
                f"best of N/{name}{suffix}": f"best_of@{{k}}/{name}",
                f"weighted vote/{name}{suffix}": f"weighted@{{k}}/{name}",
            }
        for (method, metric), k in itertools.product(families.items(), kinds):
            tokens = float(np.mean([_values(one, f"tokens@{k}").mean() for one in found]))
            rewards = np.mean([_values(one, metric.format(k=k)) for one in found], axis=0)
            yield Point(method, f"N={k}", rewards, tokens)


def _values(evaluation: Evaluation, metric: str) -> np.ndarray:
    sums, counts = evaluation.metrics[metric]
    return sums / counts


def row(point: Point, others: Sequence[Point] = ()) -> dict[str, object]:
    """The point as a CSV line; with others, its difference from the one with the nearest tokens."""
    ones = np.ones(len(point.rewards))
    own = share_interval(point.rewards, ones, resamples=RESAMPLES, seed=SEED)
    line = {"method": point.method, "setting": point.setting, "tokens": round(point.tokens, 1),
            "accuracy": own.mean, "low": own.low, "high": own.high}  # fmt: skip
    if others:
        other = min(others, key=lambda one: abs(one.tokens - point.tokens))
        gap = paired_share_interval(point.rewards, ones, other.rewards, ones, resamples=RESAMPLES, seed=SEED)
        line |= {"method": f"{point.method} - {other.method}", "setting": f"{point.setting}; {other.setting}"}
        line |= {"difference": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
    return line


def table(points: Sequence[Point], others: Sequence[Point]) -> str:
    """In Markdown: each point with every method at the nearest number of tokens, differences in brackets."""
    methods = list(dict.fromkeys(other.method for other in others))
    lines = [["search", "tokens", "accuracy", *methods], ["---"] * (3 + len(methods))]
    for point in points:
        name = f"{point.method.partition('/')[2]} {point.setting}"
        cells = [name, f"{point.tokens:.0f}", _cell(row(point), "", "low", "high")]
        for method in methods:
            of_method = [other for other in others if other.method == method]
            near = min(of_method, key=lambda one: abs(one.tokens - point.tokens))
            gap = row(point, of_method)
            cells.append(f"{near.rewards.mean():.3f} ({_cell(gap, '+', 'difference_low', 'difference_high')})")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(line: dict[str, object], sign: str, low: str, high: str) -> str:
    mean = line["difference"] if sign else line["accuracy"]
    return f"{mean:{sign}.3f} [{line[low]:{sign}.3f}, {line[high]:{sign}.3f}]"


def chart(points: Sequence[Point]) -> go.Figure:
    """Accuracy against tokens, a line for each method; searches with their 95 % intervals."""
    figure = go.Figure()
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in sorted(points, key=lambda one: one.tokens):
        lines.setdefault((point.method, point.setting.partition("lambda=")[2]), []).append(point)
    for number, ((method, exploration), own) in enumerate(sorted(lines.items(), key=lambda line: line[0])):
        rows, is_search = [row(one) for one in own], bool(exploration)
        figure.add_scatter(
            x=[one.tokens for one in own],
            y=[one["accuracy"] for one in rows],
            error_y={"array": [one["high"] - one["accuracy"] for one in rows],
                     "arrayminus": [one["accuracy"] - one["low"] for one in rows], "visible": is_search},
            name=f"{method}, lambda {exploration}" if is_search else method,
            mode="markers" if is_search else "lines",
            line={"color": COLORS[number % len(COLORS)], "dash": tuple(DASHES)[number // len(COLORS) % len(DASHES)]},
            marker={"size": 9, "symbol": tuple(SYMBOLS)[number % len(SYMBOLS)]},
        )  # fmt: skip
    axes = {"xaxis": {"type": "log", "title": "tokens per problem"}, "yaxis": {"title": "accuracy", "range": [0, 1.02]}}
    margin = {"l": 60, "r": 20, "t": 20, "b": 50}
    return figure.update_layout(template="plotly_white", width=1000, height=560, font=FONT, margin=margin, **axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, required=True)
    parser.add_argument("--reward-models", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--sizes", nargs="+", default=["2,1", "4,2", "4,4"], metavar="K,S")
    parser.add_argument("--exploration", nargs="+", type=float, default=[0.0, 0.3])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", nargs="+", type=int, default=[*range(1, 25), 32, 48, 64])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chart", type=Path, metavar="FILE.html")
    parser.add_argument("--overrides", nargs="*", metavar="search.KEY=VALUE", default=[])
    args = parser.parse_args()
    args.sizes = [tuple(map(int, size.split(","))) for size in args.sizes]
    models = dict(one.split("=", 1) for one in args.reward_models)
    points = list(sampled(args.runs, list(models), args.samples))
    rows, found = [row(point) for point in points], []
    for name, folder in models.items():
        others = [other for other in points if other.method == "majority vote" or f"/{name}" in other.method]
        others = [other for other in others if other.method.partition("/")[2] in ("", name, f"{name}, worst step")]
        of_model = list(searched(args.runs, name, folder, args))
        for point in of_model:
            of_methods = itertools.groupby(others, key=lambda other: other.method)
            rows += [row(point), *(row(point, list(of_method)) for _, of_method in of_methods)]
        print(table(of_model, others), flush=True)
        found += of_model
    if args.chart is not None:
        chart([*points, *found]).write_html(args.chart, include_plotlyjs=True, config={"displayModeBar": False})
    with args.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
