"""The probability that a candidate wins the claim of the study ``held_out``, simulated from the seeds' spread.

    python tools/docs/claim_power.py

In a simulated study each task's arms have their means and their covariance over the ten seeds, but both candidates are
better by a gain than the baseline that is best on the task. The claim's own rule judges it (``verdict.gains``).
"""

from __future__ import annotations

import sys

import numpy as np
from report_tables import markdown
from studies_table import study_rows

from nemo_edo.config.run import START
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.experiments.study import read_study
from nemo_edo.experiments.study_table import COLUMNS
from nemo_edo.experiments.verdict import WINNING_SHARE, gains, tasks_won

STUDIES = 300


def simulated(true_gain: float) -> float:
    """The share of studies in which a candidate wins."""
    study, rng = read_study(shipped_config_dir() / "studies" / "held_out.yaml"), np.random.default_rng(0)
    rows = [row for row in study_rows(study) if row["temperature"] == "best" and row["arm"] != START and row["vote"]]
    votes = {(row["task"], row["arm"], int(row["seed"])): float(row["vote"]) for row in rows}
    problems = {row["task"]: row["problems"] for row in rows}
    arms, spread = list(study.arms), {}
    for task in dict.fromkeys(task for task, *_ in votes):
        of_seeds = np.array([[votes[task, arm, seed] for arm in arms] for seed in study.seeds])
        means = dict(zip(arms, of_seeds.mean(axis=0), strict=True))
        better = max(means[arm] for arm in study.baselines) + true_gain
        spread[task] = [means[arm] if arm in study.baselines else better for arm in arms], np.cov(of_seeds.T)
    wins = 0
    for _ in range(STUDIES):
        made = []
        for task, (means, covariance) in spread.items():
            drawn = rng.multivariate_normal(means, covariance, size=len(study.seeds))
            made += [
                {**dict.fromkeys(COLUMNS, ""), "task": task, "arm": arm, "seed": str(seed), "iteration": "0",
                 "temperature": "best", "vote": str(vote), "problems": problems[task]}
                for seed, of_seed in zip(study.seeds, drawn, strict=True)
                for arm, vote in zip(arms, of_seed, strict=True)
            ]  # fmt: skip
        won = tasks_won(gains(made, study.baselines))
        wins += any(len(names) >= WINNING_SHARE * len(spread) for names in won.values())
    return wins / STUDIES


if __name__ == "__main__":
    lines = [[f"{gain:g}", f"{simulated(gain):.2f}"] for gain in (0.03, 0.04, 0.05, 0.06)]
    sys.stdout.write(markdown(["true gain over each task's best baseline", "a candidate wins"], lines) + "\n")
