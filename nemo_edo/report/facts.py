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
    records, seeds = comparison.runs.records, ", ".join(map(str, comparison.seeds))
    dates = sorted(record.summary["date"][:16].replace("T", " ") for record in records if "date" in record.summary)
    runs = [] if comparison.is_one else [f"{len(records)} runs"]
    runs += [f"{len(comparison.runs.left_out)} left out"] if comparison.runs.left_out else []
    commit, machine = (_different(record.summary.get(key) for record in records) for key in ("commit", "machine"))
    return [
        *runs,
        f"seed {seeds}" if len(comparison.seeds) == 1 else f"seeds {seeds}",
        *([f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))} UTC"] if dates else []),
        *([f"commit {commit}"] if commit else []),
        *([machine] if machine else []),
        duration(sum(record.summary["time"]["total_s"] for record in records)),
        f"{comparison.problems} test problems",
    ]


def _different(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


def facts(comparison: Comparison) -> dict[str, str]:
    """What was run, and on how much data. Comparable runs share their data, model, warm-up and evaluation."""
    record = comparison.runs.records[0]
    samples, rollouts = setting(record, "evaluation.samples"), setting(record, "evaluation.rollouts")
    versions = (one.summary["versions"].items() for one in comparison.runs.records)
    return {
        "Baseline": comparison.labels.get(comparison.baseline, "none"),
        "Model": _model(record),
        **_training(record),
        **_stopped_early(comparison),
        "Test": f"{comparison.problems} problems, greedy and {rollouts} x {samples} responses each at temperature "
        f"{comparison.temperature:g}",
        "Versions": _different(", ".join(f"{name} {version}" for name, version in found) for found in versions),
    }


def _stopped_early(comparison: Comparison) -> dict[str, str]:
    """Arms whose training ended before their last iteration (``early_stop``), and why."""
    said = []
    for record in comparison.runs.records:
        seed = "" if comparison.is_one else f" (seed {record.seed})"
        arms = (about for about in record.summary["arms"].values() if "stopped_early" in about)
        said += [f"{about['label']}{seed} {about['stopped_early']}" for about in arms]
    return {"Stopped early": "; ".join(said)} if said else {}


def _model(record: RunRecord) -> str:
    if setting(record, "model.path"):
        return str(setting(record, "model.path"))
    shown = ("model_type", "num_hidden_layers", "hidden_size")
    return ", ".join(f"{key} {value}" for key, value in setting(record, "model.architecture").items() if key in shown)


def _training(record: RunRecord) -> dict[str, str]:
    if record.config.get("algorithm") == "none":
        return {}
    data = setting(record, "data")
    built_in = setting(record, "data.test") is None and not data.get("source")
    own = data.get("source") or data["train"]
    training = f"{data['arithmetic']['train_problems']} problems of the built-in task" if built_in else own
    prompts, each = setting(record, "grpo.problems_per_iteration"), setting(record, "sampling.samples_per_prompt")
    return {
        "Training": f"{training}, {prompts or 'all'} prompts x {each} responses per iteration",
        "Warm-up": f"{setting(record, 'sft.steps')} supervised steps",
    }


def differing_settings(runs: RunSet) -> dict[str, dict[str, str]]:
    """Setting -> arm -> its value, of the settings in which arms differ; "" where an arm's algorithm lacks it."""
    trained = {arm: by_seed[min(by_seed)] for arm, by_seed in runs.arms.items()}
    of_arms = {arm: arm_settings(one.record, one.name) for arm, one in trained.items()}
    keys = dict.fromkeys(key for settings in of_arms.values() for key in settings)
    values = {key: {arm: _text(found[key]) if key in found else "" for arm, found in of_arms.items()} for key in keys}
    return {key: by_arm for key, by_arm in values.items() if len(set(by_arm.values())) > 1}


def phases(runs: RunSet) -> list[tuple[str, float]]:
    """(phase, seconds) of all runs together, the longest first; nothing of runs whose lines have no phases."""
    seconds: Counter[str] = Counter()
    for clocks in (line["time"] for record in runs.records for line in record.lines if line["kind"] == "phases"):
        named = {phase: clocks.get(f"{phase}_s", 0.0) for phase in PHASES}
        seconds.update({**named, "without a name": clocks["wall_s"] - sum(named.values())})
    return [(phase.replace("_", " "), spent) for phase, spent in seconds.most_common() if spent >= SHOWN_S]


def markdown_table(comparison: Comparison, metrics: list[str]) -> str:
    """The first screen's table for a README or an issue."""
    rows = [["arm", *map(metric_name, metrics)], ["---"] * (len(metrics) + 1)]
    for arm, label in comparison.labels.items():
        cells = [comparison.table[arm][metric] for metric in metrics]
        rows.append([_plain(label), *("" if cell is None else _cell(cell.interval, cell.known) for cell in cells)])
    if comparison.replicate:
        noise = comparison.replicate.noise
        row = [f"±{noise[metric]:.3f}" if metric in noise else "" for metric in metrics]
        rows.append(["noise of training", *row])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(interval: Any, known: bool) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]" if known else f"{interval.mean:.3f}"


def _plain(text: str) -> str:
    """Without what Markdown would read as markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
