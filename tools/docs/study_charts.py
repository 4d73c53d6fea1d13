"""The charts of docs/images/ that show the studies' CSV files.

    python tools/docs/study_charts.py

The tests compare the pictures with what this gives.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from paper_claims import FAMILIES
from studies_table import AT_1, SHOWN, Difference, name, over_tasks, studies, study_rows

from nemo_edo.config.compose import compose_run
from nemo_edo.evaluation.results import seeds_interval
from nemo_edo.report.plotting import COLORS, START_COLOR

ROOT = Path(__file__).parents[2]
DIFFERENCES = ("alpha_sweep", "rivals", "idpo")
LARGEST = {"vote": "vote@10", "pass": "pass@10"}
METRICS = {LARGEST.get(metric, metric): title for metric, title in SHOWN.items()}
CURVES = (
    "majority vote",
    "best of N/nce, worst step",
    "weighted vote/nce, worst step",
    "best of N/nce_answer",
    "weighted vote/nce_answer",
)
SEARCHES = ("SearchLLM/nce", "SearchLLM/nce_answer")
"""Methods of docs/studies/search.csv: the strongest forms, and the searches that they are compared with."""
INK, GRID = "#1f2328", "#d0d4da"
FONT = "system-ui, sans-serif"
Row = dict[str, str]
MAPPED = ("development", "held_out")
"""The files with the doses of the paper's term, all tasks together."""
MAP_METRICS = {("distinct_4", "1"): "Distinct-4", ("accuracy", "1"): "sampled accuracy", ("vote", "best"): "vote@10"}
"""(column, temperature) of the map's lines of panels; votes at the temperature that is best on training problems."""


@dataclass(frozen=True)
class Axis:
    """Maps values from low to high onto pixels from begin to end."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def charts() -> dict[str, str]:
    """The SVG of each picture, by its file's name."""
    found = {f"{study}.svg": differences(rows_of(study)) for study in DIFFERENCES}
    mapped = [row for study in MAPPED for row in rows_of(study)]
    found["held_out.svg"] = differences(
        held_out_rows(), ", meaned over the tasks (of votes, three); votes at the best temperature"
    )
    return {**found, "search.svg": accuracy_by_tokens(rows_of("search")), "dose_map.svg": dose_map(mapped)}


def rows_of(study: str) -> list[Row]:
    with (ROOT / "docs" / "studies" / f"{study}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def held_out_rows() -> list[Row]:
    """The arms of the held-out study, over all its tasks, as ``differences`` reads them."""
    [study] = [one for one in studies() if one.held_out]
    return [as_row(one) for one in over_tasks(study_rows(study), study, {**AT_1, "vote": "best"})]


def as_row(one: Difference) -> Row:
    interval = seeds_interval(one.metric, one.values, differences=True)
    numbers = {"difference": interval.mean, "difference_low": interval.low, "difference_high": interval.high}
    found = {key: str(value) for key, value in numbers.items()}
    return {"arm": name(one.arm), "metric": LARGEST.get(one.metric, one.metric), "baseline": "GRPO", **found}


def differences(rows: list[Row], more: str = "") -> str:
    """A panel for each metric, in it each arm's difference from the baseline with its 95 % interval over seeds."""
    compared = [row for row in rows if row["difference"] and row["metric"] in METRICS]
    arms = list(dict.fromkeys(row["arm"] for row in compared))
    left, width, gap, head, line, foot = 210, 250, 15, 24, 22, 26
    height = head + line * len(arms) + foot
    parts = []
    for place, (metric, title) in enumerate(METRICS.items()):
        of_metric = {row["arm"]: row for row in compared if row["metric"] == metric}
        ends = [abs(float(row[end])) for row in of_metric.values() for end in ("difference_low", "difference_high")]
        reach = nice(max(ends))
        x0, y0 = left + place % 3 * (width + gap), place // 3 * height
        x = Axis(-reach, reach, x0 + 14, x0 + width - 14)
        bottom = y0 + height - foot
        parts.append(text(x(0), y0 + 17, title, weight="bold", anchor="middle"))
        for value in (-reach, 0.0, reach):
            label, color = (f"{value:+g}", GRID) if value else ("0", START_COLOR)
            parts.append(stroke([(x(value), y0 + head), (x(value), bottom)], color))
            parts.append(text(x(value), bottom + 15, label, size=11, anchor="middle"))
        for number, arm in enumerate(arms):
            y, color, row = y0 + head + line * (number + 0.5), COLORS[number % len(COLORS)], of_metric[arm]
            parts += [text(left - 8, y + 4, arm, anchor="end")] if place % 3 == 0 else []
            parts += [stroke([(x(float(row[end])), y) for end in ("difference_low", "difference_high")], color, 2),
                      mark(x(float(row["difference"])), y, color)]  # fmt: skip
    baseline = compared[0]["baseline"]
    note = f"Difference from {baseline}, paired by seed, with Student's t intervals (95 %){more}"
    parts.append(text(left, 2 * height + 14, note, size=12))
    return svg(left + 3 * (width + gap), 2 * height + 24, note, parts)


def dose_map(rows: list[Row]) -> str:
    """A line for each task, a column for each metric: what each dose of a method changes, in the mean over seeds and
    for each seed."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    left, width, gap, head, height, foot = 94, 230, 44, 34, 84, 28
    parts = []
    for column, ((metric, temperature), title) in enumerate(MAP_METRICS.items()):
        found = {task: dose_differences(rows, task, metric, temperature) for task in tasks}
        reach = nice(max(abs(value) for of_task in found.values() for _, _, value in of_task))
        x0 = left + column * (width + gap)
        x = Axis(math.log(5e-4), math.log(2), x0, x0 + width)
        parts.append(text(x0 + width / 2, 16, title, weight="bold", anchor="middle"))
        for line, task in enumerate(tasks):
            y0 = head + line * (height + foot)
            y = Axis(-reach, reach, y0 + height, y0)
            parts += [text(0, y(0) + 4, task, weight="bold")] if column == 0 else []
            if not found[task]:
                parts.append(text(x0 + width / 2, y(0) + 4, "no votes", anchor="middle"))
                continue
            for value in (-reach, 0.0, reach):
                parts.append(stroke([(x0, y(value)), (x0 + width, y(value))], GRID if value else START_COLOR))
                parts.append(text(x0 - 4, y(value) + 4, f"{value:+g}" if value else "0", size=10, anchor="end"))
            for value in (0.001, 0.01, 0.1, 1):
                parts.append(text(x(math.log(value)), y0 + height + 14, f"{value:g}", size=10, anchor="middle"))
            for number, family in enumerate(FAMILIES):
                parts += curve([(x(math.log(dose)), y(value)) for arm, dose, value in found[task] if arm == family.arm],
                               COLORS[number])  # fmt: skip
    bottom = head + len(tasks) * (height + foot) + 14
    place = left
    for number, family in enumerate(FAMILIES):
        parts += [mark(place, bottom, COLORS[number]), text(place + 9, bottom + 4, family.method)]
        place += 40 + 8 * len(family.method)
    notes = ["Difference from GRPO (of ED-iDPO from ETO) over the exploration weight",
             "Dots are seeds, lines their means; votes at the best temperature"]  # fmt: skip
    parts += [text(left, bottom + 26 + 18 * number, note, size=12) for number, note in enumerate(notes)]
    return svg(left + len(MAP_METRICS) * (width + gap), bottom + 56, notes[0], parts)


def dose_differences(rows: list[Row], task: str, metric: str, temperature: str) -> list[tuple[str, float, float]]:
    """(arm, weight of exploration, the metric minus the baseline's of the same seed) of each training."""
    of_task = [
        row for row in rows if (row["task"], row["temperature"], row["note"]) == (task, temperature, "") and row[metric]
    ]
    values = {(row["arm"], row["dose"], row["seed"]): float(row[metric]) for row in of_task}
    found = []
    for family in FAMILIES:
        weight = beta_of_idpo() if family.arm == "ed_idpo" else 1
        for (arm, dose, seed), value in values.items():
            if arm == family.arm and (family.baseline, "", seed) in values:
                found.append((arm, float(dose) * weight, value - values[family.baseline, "", seed]))
    return found


@cache
def beta_of_idpo() -> float:
    """The studies'; ED-iDPO's doses are alphas, and its weight is alpha beta."""
    return compose_run("study/sums", []).idpo.beta


def curve(points: list[tuple[float, float]], color: str) -> list[str]:
    """A dot for each point, and a line through the means of those at one place."""
    by_place: dict[float, list[float]] = {}
    for x, y in points:
        by_place.setdefault(x, []).append(y)
    means = [(x, sum(ys) / len(ys)) for x, ys in sorted(by_place.items())]
    return [stroke(means, color, 2), *(mark(x, y, color, radius=2) for x, y in points)] if points else []


def accuracy_by_tokens(rows: list[Row]) -> str:
    """Curves over tokens per problem (logarithmic), and the searches as points with their 95 % intervals."""
    width, height, left, right, top, bottom = 930, 430, 56, 640, 14, 380
    x, y = Axis(math.log(20), math.log(1400), left, right), Axis(0, 1, bottom, top)
    parts = []
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        parts += [
            stroke([(left, y(share)), (right, y(share))], GRID),
            text(left - 8, y(share) + 4, f"{share:g}", anchor="end"),
        ]
    for tokens in (20, 50, 100, 200, 500, 1000):
        at = x(math.log(tokens))
        parts += [stroke([(at, bottom), (at, bottom + 5)], INK), text(at, bottom + 20, str(tokens), anchor="middle")]
    parts += [text((left + right) / 2, bottom + 42, "tokens per problem", anchor="middle"),
              text(left + 8, top + 12, "accuracy")]  # fmt: skip
    legend = Axis(0, 1, 30, 52)
    for number, method in enumerate(CURVES):
        color = COLORS[number % len(COLORS)]
        found = sorted((float(row["tokens"]), float(row["accuracy"])) for row in rows if row["method"] == method)
        parts.append(stroke([(x(math.log(tokens)), y(accuracy)) for tokens, accuracy in found], color, 2))
        parts += [stroke([(right + 20, legend(number)), (right + 44, legend(number))], color, 2),
                  text(right + 52, legend(number) + 4, method)]  # fmt: skip
    searches = [(method, weight) for method in SEARCHES for weight in ("lambda=0", "lambda=0.3")]
    for number, (method, weight) in enumerate(searches):
        color, aside, place = (INK, "#c8102e")[number // 2], (number - 1.5) * 5, legend(len(CURVES) + number)
        filled = number % 2 == 0
        for row in (row for row in rows if row["method"] == method and row["setting"].split()[-1] == weight):
            at = x(math.log(float(row["tokens"]))) + aside
            parts += [stroke([(at, y(float(row["low"]))), (at, y(float(row["high"])))], color),
                      mark(at, y(float(row["accuracy"])), color, filled=filled)]  # fmt: skip
        parts += [mark(right + 32, place, color, filled=filled), text(right + 52, place + 4, f"{method}, {weight}")]
    return svg(width, height, "Accuracy against tokens per problem", parts)


def nice(value: float) -> float:
    """The next of 1, 2, 3, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 3, 5, 10) if factor * power >= value)


# --- the pieces of a picture --------------------------------------------------------------------------------------


def svg(width: int, height: int, title: str, parts: Iterable[str], maker: str = "study_charts") -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">\n'
        f"<!-- by tools/docs/{maker}.py -->\n<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, *, size: int = 13, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def stroke(points: list[tuple[float, float]], color: str, width: float = 1) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'


def mark(x: float, y: float, color: str, *, filled: bool = True, radius: int = 4) -> str:
    inside = color if filled else "white"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{inside}" stroke="{color}" stroke-width="1.5"/>'


def write(pictures: dict[str, str]) -> None:
    """Each picture into its file of docs/images/."""
    for file_name, picture in pictures.items():
        (ROOT / "docs" / "images" / file_name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    write(charts())
