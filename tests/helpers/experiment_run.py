"""Writes the folder of a finished run of a shipped experiment, with made-up numbers of each problem."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_edo.config import RunConfig
from nemo_edo.config.compose import arm_configs, resolved_yaml
from nemo_edo.config.run import arm_label
from nemo_edo.evaluation.results import START
from nemo_edo.report.run_set import RunRecord, read_run


def write_experiment_run(folder: Path, cfg: RunConfig, shares: Mapping[str, Mapping[str, Sequence[float]]],
                         lines: Sequence[dict] = ()) -> Path:
    """``shares``: arm -> metric -> its value on each problem. Arms that are not named have no problem right.
    ``lines``: of metrics.jsonl."""
    arms = arm_configs(cfg)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(cfg))
    summary = {
        "name": cfg.name, "seed": cfg.seed, "versions": {}, "time": {"total_s": 1.0},
        "baseline": next(iter(arms), None),
        "arms": {name: {"label": arm_label(settings), "alpha": settings.effective_alpha, "beta": settings.beta,
                        "exploration_weight": settings.exploration_weight,
                        "log_ratio_floor": settings.log_ratio_floor,
                        "entropy_coefficient": getattr(settings, "entropy_coefficient", 0.0),
                        "iterations": settings.iterations} for name, settings in arms.items()}}
    (folder / "summary.json").write_text(json.dumps(summary))
    size = len(next(iter(next(iter(shares.values())).values())))
    for arm in (START, *arms):
        metrics = shares.get(arm, {"greedy_accuracy": [0.0] * size, "vote@10": [0.0] * size})
        write_evaluation(folder / "evaluations" / f"{arm}.json", arm, metrics)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples.json").write_text("[]")
    return folder


def write_evaluation(path: Path, arm: str, metrics: Mapping[str, Sequence[float]]) -> None:
    """Each metric by its value on each problem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = len(next(iter(metrics.values())))
    path.write_text(json.dumps({"arm": arm, "problems": [f"test-{place}" for place in range(size)], "metrics": {
        name: {"sum": list(values), "count": [1] * size} for name, values in metrics.items()}}))


def experiment_record(folder: Path, cfg: RunConfig) -> RunRecord:
    """Such a run, read back."""
    return read_run(write_experiment_run(folder, cfg, {START: {"greedy_accuracy": [1.0]}}))
