"""The probability that a candidate wins the claim of the study ``held_out``, simulated from the seeds' spread.

    python tools/docs/claim_power.py

In a simulated study each task's arms have their means and their covariance over the ten seeds, but both candidates are
better by a gain than the baseline that is best on the task. The claim's own rule judges it (``verdict.gains``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from report_tables import markdown

from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.experiments.study import read_study
from nemo_edo.experiments.study_table import COLUMNS, cell_of, read_rows
from nemo_edo.experiments.verdict import WINNING_SHARE, gains, tasks_won

ROOT = Path(__file__).parents[2]
STUDIES = 300


def simulated(true_gain: float) -> float:
    """The share of studies in which a candidate wins."""
    study, rng = read_study(shipped_config_dir() / "studies" / "held_out.yaml"), np.random.default_rng(0)
    cells = {cell.key for cell in study.cells}
    rows = [row for row in read_rows(ROOT / study.table) if cell_of(row) in cells and row["temperature"] == "best"]
    tasks, arms, wins = [task for task in study.tasks if any(r["vote"] for r in rows if r["task"] == task)], {}, 0
    for row in rows:
        arms.setdefault(row["arm"], {})[row["task"], int(row["seed"])] = row
    for _ in range(STUDIES):
        made = []
        for task in tasks:
            votes = np.array([[float(of_arm[task, seed]["vote"]) for of_arm in arms.values()] for seed in study.seeds])
            means = votes.mean(axis=0)
            best = max(means[place] for place, arm in enumerate(arms) if arm in study.baselines)
            means = [
                mean if arm in study.baselines else best + true_gain for arm, mean in zip(arms, means, strict=True)
            ]
            drawn = rng.multivariate_normal(means, np.cov(votes.T), size=len(study.seeds))
            made += [
                {**dict.fromkeys(COLUMNS, ""), "task": task, "arm": arm, "seed": str(seed), "iteration": "0",
                 "temperature": "best", "vote": str(vote)}
                for seed, of_seed in zip(study.seeds, drawn, strict=True)
                for arm, vote in zip(arms, of_seed, strict=True)
            ]  # fmt: skip
        won = tasks_won(gains(made, study.baselines))
        wins += any(len(names) >= WINNING_SHARE * len(tasks) for names in won.values())
    return wins / STUDIES


if __name__ == "__main__":
    lines = [[f"{gain:g}", f"{simulated(gain):.2f}"] for gain in (0.03, 0.04, 0.05, 0.06)]
    sys.stdout.write(markdown(["true gain over each task's best baseline", "a candidate wins"], lines) + "\n")
