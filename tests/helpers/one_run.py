"""A run in memory, as the set of one run that a report is about."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nemo_edo.evaluation.results import Evaluation
from nemo_edo.report.run_set import ArmSettings, RunRecord, RunSet, Trained, lines_table

Curve = Sequence[tuple[float, float]]
"""(accuracy, entropy) of each collection."""


def evaluation(arm: str, problems: Sequence[str] | int = 50, **metrics: Sequence[float]) -> Evaluation:
    """Each metric by its value on each problem; ``vote_at_4`` is vote@4."""
    names = tuple(f"test-{place}" for place in range(problems)) if isinstance(problems, int) else tuple(problems)
    ones = np.ones(len(names))
    pairs = {name.replace("_at_", "@"): (np.asarray(values, dtype=float), ones) for name, values in metrics.items()}
    return Evaluation(arm, names, pairs)


def settings(label: str, weight: float = 0.0) -> ArmSettings:
    return ArmSettings(label, None, weight, 3)


def one_run(evaluations: Sequence[Evaluation], arms: Mapping[str, ArmSettings], *, baseline: str | None = None,
            curves: Mapping[str, Curve] | None = None, seed: int = 42, bootstrap: int = 200,
            replicate: Evaluation | None = None) -> RunSet:
    lines = [
        {"kind": "collection", "arm": arm, "iteration": place, "reward": accuracy, "entropy": entropy}
        for arm, curve in (curves or {}).items()
        for place, (accuracy, entropy) in enumerate(curve)
    ]
    record = RunRecord(
        folder=Path("run"), config={"evaluation": {"bootstrap": bootstrap}}, config_text="", test_time={}, samples=[],
        summary={"seed": seed, "baseline": baseline}, arms=dict(arms), lines=lines_table(lines),
        evaluations={one.arm: one for one in evaluations}, replicate=replicate,
    )  # fmt: skip
    trained = {arm: {seed: Trained(record, arm)} for arm in arms}
    return RunSet((record,), trained, {arm: known.label for arm, known in arms.items()}, {}, record.folder)
