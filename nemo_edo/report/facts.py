"""What a page says about its runs besides results: what was run, on what, how long, and how the arms differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nemo_edo.evaluation.results import metric_name
from nemo_edo.report.comparison import Comparison
from nemo_edo.report.run_record import RunRecord, setting
from nemo_edo.report.run_set import RunSet, arm_settings
from nemo_edo.utils.phases import PHASES

SHOWN_S = 0.1
"""Seconds below which a phase is not named."""


def headline(comparison: Comparison) -> list[str]:
    """The facts under the page's name: seeds, date, commit, machine, duration, size. Older runs lack some."""
    records, seeds = comparison.runs.records, comparison.seeds
    dates = sorted(record.summary["date"][:16].replace("T", " ") for record in records if "date" in record.summary)
    said = [
        "" if comparison.is_one else f"{len(records)} runs",
        f"{len(comparison.runs.left_out)} left out" if comparison.runs.left_out else "",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))} UTC" if dates else "",
        *(f"{prefix}{found}" for key, prefix in (("commit", "commit "), ("machine", ""))
          if (found := _different(record.summary.get(key) for record in records))),
        duration(sum(record.summary["time"]["total_s"] for record in records)),
        f"{comparison.problems} test problems",
    ]  # fmt: skip
    return [fact for fact in said if fact]


def _different(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


def facts(comparison: Comparison) -> dict[str, str]:
    """What was run, and on how much data. Comparable runs share their data, model, warm-up and evaluation."""
    records = comparison.runs.records
    samples, rollouts = (setting(records[0], f"evaluation.{key}") for key in ("samples", "rollouts"))
    versions = (one.summary["versions"].items() for one in records)
    stopped = [
        f"{about['label']}{'' if comparison.is_one else f' (seed {record.seed})'} {about['stopped_early']}"
        for record in records
        for about in record.summary["arms"].values()
        if "stopped_early" in about
    ]
    return {
        "Baseline": comparison.labels.get(comparison.baseline, "none"),
        "Model": _model(records[0]),
        **_training(records[0]),
        **({"Stopped early": "; ".join(stopped)} if stopped else {}),
        "Test": f"{comparison.problems} problems, greedy and {rollouts} x {samples} responses each at temperature "
        f"{comparison.temperature:g}",
        "Versions": _different(", ".join(f"{name} {version}" for name, version in found) for found in versions),
    }


def _model(record: RunRecord) -> str:
    if setting(record, "model.path"):
        return str(setting(record, "model.path"))
    shown = ("model_type", "num_hidden_layers", "hidden_size")
    return ", ".join(f"{key} {value}" for key, value in setting(record, "model.architecture").items() if key in shown)


def _training(record: RunRecord) -> dict[str, str]:
    if record.config.get("algorithm") == "none":
        return {}
    data = setting(record, "data")
    training = data.get("source") or data["train"]
    if setting(record, "data.test") is None and not data.get("source"):
        training = f"{data['arithmetic']['train_problems']} problems of the built-in task"
    prompts, each = setting(record, "grpo.problems_per_iteration"), setting(record, "sampling.samples_per_prompt")
    return {
        "Training": f"{training}, {prompts or 'all'} prompts x {each} responses per iteration",
        "Warm-up": f"{setting(record, 'sft.steps')} supervised steps",
    }


def differing_settings(runs: RunSet) -> dict[str, list[str]]:
    """Setting -> its value in each arm, of the settings in which arms differ; "" where an arm's algorithm lacks it."""
    trained = (by_seed[min(by_seed)] for by_seed in runs.arms.values())
    of_arms = [arm_settings(one.record, one.name) for one in trained]
    values = {
        key: [_text(settings[key]) if key in settings else "" for settings in of_arms]
        for key in dict.fromkeys(key for settings in of_arms for key in settings)
    }
    return {key: by_arm for key, by_arm in values.items() if len(set(by_arm)) > 1}


def phases(runs: RunSet) -> list[tuple[str, float]]:
    """(phase, seconds) of all runs together, the longest first; nothing of runs whose lines have no phases."""
    seconds: Counter[str] = Counter()
    for clocks in (clocks for record in runs.records for clocks in record.lines.query("kind == 'phases'")["time"]):
        named = {phase: clocks.get(f"{phase}_s", 0.0) for phase in PHASES}
        seconds.update({**named, "without a name": clocks["wall_s"] - sum(named.values())})
    return [(phase.replace("_", " "), spent) for phase, spent in seconds.most_common() if spent >= SHOWN_S]


def markdown_table(comparison: Comparison, metrics: list[str]) -> str:
    """The first screen's table for a README or an issue."""
    rows = [["arm", *map(metric_name, metrics)], ["---"] * (len(metrics) + 1)]
    for arm, label in comparison.labels.items():
        plain = " ".join(label.split()).replace("|", "\\|").replace("<", "&lt;")  # no markup of Markdown
        rows.append([plain, *(_cell(comparison, arm, metric) for metric in metrics)])
    if comparison.replicate:
        noise = comparison.noise
        rows.append(["noise of training", *(f"±{noise[m]:.3f}" if m in noise else "" for m in metrics)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(comparison: Comparison, arm: str, metric: str) -> str:
    cell = comparison.cell(arm, metric)
    if cell is None:
        return ""
    ends = f" [{cell.interval.low:.3f}, {cell.interval.high:.3f}]" if cell.known else ""
    return f"{cell.interval.mean:.3f}{ends}"


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
